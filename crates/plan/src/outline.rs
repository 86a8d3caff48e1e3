//! Everything that all ranks agree on, from which one rank's plan or all of them are written out.

use counterpoint_mask::{Band, Range};

use crate::division::Owners;
use crate::rank_outline::RankOutline;
use crate::stage_cuts::StageCuts;
use crate::{GroupPart, Plan, PlanError, Planning, RankPlan, RemoteSplit, StagePlan};

/// A rank's parts in the group-casts of a pass and its bands, by stage.
type Parts = (Vec<GroupPart>, Vec<Vec<Band>>);

/// Everything that all ranks agree on, before bands and splits of the stages are written out. The shared, cheap half of
/// a plan: one rank's part follows from it alone.
#[derive(Clone, Debug)]
pub struct Outline {
    /// Who owns which rows.
    pub owners: Owners,
    /// By rank.
    pub ranks: Vec<RankOutline>,
    /// The stages of a forward.
    pub forward: StageCuts,
    /// The stages of a backward.
    pub backward: StageCuts,
}

impl Outline {
    /// Writes out every rank's part.
    ///
    /// # Errors
    /// [`PlanError::Cancelled`].
    pub fn into_plan(self, planning: &Planning<'_>) -> Result<Plan, PlanError> {
        let passes = [&self.forward, &self.backward];
        let bands = planning.map(self.ranks.len(), |rank| passes.map(|cuts| self.bands(rank, cuts)))?;
        let [forward, backward] = passes.map(|cuts| self.parts_of_all(cuts, planning));
        let parts = forward?.into_iter().zip(backward?).zip(bands).enumerate();
        let ranks = parts.map(|(rank, ((forward, backward), [in_forward, in_backward]))| {
            self.rank_plan(rank, (forward, in_forward), (backward, in_backward))
        });
        let ranks = ranks.collect();
        let Owners { q_dispatch, k_dispatch, .. } = self.owners;
        Ok(Plan { q_dispatch, k_dispatch, ranks, queries_go_straight: false, two_level: None })
    }

    /// Writes out every rank's part, unless their pieces would take more than `available` bytes.
    ///
    /// # Errors
    /// [`PlanError::Memory`] before they are made; [`PlanError::Cancelled`].
    pub fn into_plan_within(self, available: u64, planning: &Planning<'_>) -> Result<Plan, PlanError> {
        let needed = self.plan_bytes();
        if needed > available {
            return Err(PlanError::Memory { ranks: self.ranks.len(), needed, available });
        }
        self.into_plan(planning)
    }

    /// Writes out the part of `rank` alone, equal to that of the whole plan.
    ///
    /// # Panics
    /// When `rank` is not below the number of ranks.
    pub fn into_rank(self, rank: usize) -> RankPlan {
        let [forward, backward] = [&self.forward, &self.backward]
            .map(|cuts| (self.parts_of_one(cuts, rank), self.bands(rank, cuts)));
        self.rank_plan(rank, forward, backward)
    }

    /// The bands of one rank, by stage.
    fn bands(&self, rank: usize, cuts: &StageCuts) -> Vec<Vec<Band>> {
        cuts.bands(rank, &self.ranks[rank])
    }

    /// The parts in all group-casts, by rank, then stage.
    fn parts_of_all(
        &self,
        cuts: &StageCuts,
        planning: &Planning<'_>,
    ) -> Result<Vec<Vec<GroupPart>>, PlanError> {
        let mut parts = vec![Vec::with_capacity(cuts.stages()); self.ranks.len()];
        parts.iter_mut().for_each(|parts| parts.push(GroupPart::default()));
        let of_stage = |before: usize| cuts.parts(&self.owners.k_runs, before + 1);
        for stage_parts in planning.map(cuts.stages() - 1, of_stage)? {
            parts.iter_mut().zip(stage_parts).for_each(|(parts, part)| parts.push(part));
        }
        Ok(parts)
    }

    /// One rank's parts in all group-casts, by stage.
    fn parts_of_one(&self, cuts: &StageCuts, rank: usize) -> Vec<GroupPart> {
        let mut parts = vec![GroupPart::default()];
        parts.extend((1..cuts.stages()).map(|stage| cuts.part(&self.owners.k_runs, stage, rank)));
        parts
    }

    fn rank_plan(&self, rank: usize, forward: Parts, backward: Parts) -> RankPlan {
        let forward = self.stage_plans(rank, &self.forward, forward);
        let hosted = self.ranks[rank].hosted.clone();
        RankPlan {
            rank,
            q_ranges: self.owners.q_dispatch.ranges(rank),
            k_ranges: self.ranks[rank].own.clone(),
            q_rows: self.owners.q_dispatch.tokens(rank),
            k_rows: self.owners.k_dispatch.tokens(rank),
            area: forward.iter().map(|stage| stage.area).sum::<u64>()
                + hosted.as_ref().map_or(0, |work| work.area),
            forward,
            backward: self.stage_plans(rank, &self.backward, backward),
            hosted,
        }
    }

    fn stage_plans(&self, rank: usize, cuts: &StageCuts, (parts, bands): Parts) -> Vec<StagePlan> {
        let stages = parts.into_iter().zip(bands).enumerate();
        let stages = stages.map(|(stage, (part, bands))| {
            let recv_ranges = cuts.rows(rank, stage).to_vec();
            let own_rows = cuts.own_rows(rank, stage);
            let key_rows = match stage {
                0 => self.owners.k_dispatch.tokens(rank),
                _ => own_rows + recv_ranges.iter().map(Range::len).sum::<usize>(),
            };
            let area = bands.iter().map(Band::area).sum();
            StagePlan { part, recv_ranges, own_rows, key_rows, bands: bands.into(), area }
        });
        stages.collect()
    }

    /// Bytes of all ranks' pieces, about: every range that a rank receives has one for each owner's run that it crosses, in a list
    /// of the receiver, and the receiver's number in a list of the owner.
    pub fn plan_bytes(&self) -> u64 {
        const PIECE_BYTES: u64 = (size_of::<RemoteSplit>() + size_of::<u32>()) as u64;
        let pieces = |cuts: &StageCuts| -> u64 {
            let stages =
                (0..self.ranks.len()).flat_map(|rank| (1..cuts.stages()).map(move |stage| (rank, stage)));
            let ranges = stages.flat_map(|(rank, stage)| cuts.rows(rank, stage));
            ranges.map(|range| self.owners.k_runs.overlapping(range).len() as u64).sum()
        };
        (pieces(&self.forward) + pieces(&self.backward)) * PIECE_BYTES
    }
}
