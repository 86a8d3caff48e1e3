//! `counterpoint bench cp`.

mod case;
mod hiding;
mod peers;
mod sizes;
mod step;

use counterpoint_choose::PlanConfig;
use counterpoint_console::{
    self as console, CliError, CommandLine, Progress, Schema,
    arguments::{Device, Exchange, OverlapChoice, PassOverlaps},
    launched::{as_rank, launch, refuse_other_sizes},
    nodes::topology,
    output::Outputs,
    rank_machine::RankMachine,
    solution::Solution,
};
use counterpoint_cost::MachineProfile;
use counterpoint_exec::{AttentionInputs, Pass, RunConfig, random_inputs};
use counterpoint_mask::{Mask, MaskPreset};
use counterpoint_plan::{AttentionSpec, DType, Planning, Topology};
use counterpoint_schedule::{GradientReduction, OverlapPolicy, PassPolicies};

use self::case::{Case, Traced, trace};
use self::peers::{PeerResult, PeerRow};
use self::sizes::Sizes;
use crate::arguments::BenchCpArguments;
use crate::attention::{OUT_OF_BOUNDS, Section};
use crate::masks;
use crate::pytorch::Peers;
use crate::rows::all_right;
use counterpoint_console::FlagFault;

/// Rows and keys that are compared with the definition, in f64.
const SAMPLED_ROWS: usize = 32;
const SAMPLED_KEYS: usize = 8;
const WARM_UPS: usize = 3;
/// Nothing side by side.
const SEQUENTIAL: PassOverlaps = {
    let sequential = OverlapChoice::Named(OverlapPolicy::SEQUENTIAL);
    PassOverlaps { forward: sequential, backward: sequential }
};

/// `counterpoint bench cp`.
pub(crate) fn run(arguments: &BenchCpArguments, line: &CommandLine) -> Result<(), CliError> {
    match launch()? {
        None => measure_all(
            arguments,
            &RankMachine::open(arguments.device, arguments.cp_size, arguments.transport)?
                .measured(arguments.planning.profile.as_deref())?,
        ),
        Some(launch) => as_rank(&launch, line, RunConfig::default().world.limit, |rendezvous| {
            refuse_other_sizes(&launch, "--cp-size", arguments.cp_size.unwrap_or(launch.world_size))?;
            refuse_threads_alone(arguments)?;
            let topology = topology(launch.world_size, arguments.nodes)?;
            let ranks = RankMachine::join(rendezvous, &launch, arguments.transport, topology)?;
            measure_all(arguments, &ranks)
        }),
    }
}

/// What only ranks that are threads do.
fn refuse_threads_alone(arguments: &BenchCpArguments) -> Result<(), CliError> {
    if !arguments.peers.is_empty() {
        return Err(CliError::flag("--peers", arguments.peers.join(","), FlagFault::StartsProcesses));
    }
    if arguments.step {
        return Err(CliError::flag("--step", "(whole steps)", FlagFault::CapturesThreads));
    }
    if arguments.device == Device::Cpu {
        return Err(CliError::flag("--device", "cpu", FlagFault::CpuThreadsAlone));
    }
    Ok(())
}

fn measure_all(arguments: &BenchCpArguments, ranks: &RankMachine) -> Result<(), CliError> {
    let sizes = Sizes::of(arguments, ranks.gpus());
    let topology = topology(sizes.cp_size, arguments.nodes)?;
    // One process writes what all have timed.
    let traced_to = arguments.trace.as_deref().filter(|_| ranks.prints());
    let outputs = Outputs::check(&[("--trace", traced_to)])?;
    if ranks.prints() {
        console::note_development_build();
    }
    let mut wrong = Vec::new();
    let mut traced = Vec::new();
    let mut peers = peers::start(arguments, &sizes)?;
    for &tokens in &sizes.tokens {
        let bench = Bench::new(arguments, ranks, topology, &sizes, tokens)?;
        let (section, peer_rows) = match arguments.step {
            true => (bench.measure_steps(&arguments.masks)?, Vec::new()),
            false => bench.measure(&arguments.masks, &mut traced, &mut peers)?,
        };
        if !ranks.prints() {
            continue;
        }
        section.print(Schema::BenchCp, arguments.json)?;
        if arguments.json {
            peer_rows.iter().try_for_each(|row| console::print_json(Schema::BenchCpPeer, row))?;
        } else {
            peers::print(&peer_rows)?;
        }
        wrong.extend(section.wrong);
    }
    outputs.write(|_| Ok(trace(&traced).into_bytes()))?;
    all_right(OUT_OF_BOUNDS, &wrong)?;
    peers.end()
}

/// One number of tokens, with its tensors.
struct Bench<'a> {
    arguments: &'a BenchCpArguments,
    ranks: &'a RankMachine,
    topology: Topology,
    tokens: usize,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    profile: Option<MachineProfile>,
    /// Those that are compared, each once.
    overlaps: Vec<PassOverlaps>,
}

impl<'a> Bench<'a> {
    fn new(
        arguments: &'a BenchCpArguments,
        ranks: &'a RankMachine,
        topology: Topology,
        sizes: &Sizes,
        tokens: usize,
    ) -> Result<Self, CliError> {
        let (heads_q, heads_kv) = sizes.heads;
        let dtype = match ranks {
            RankMachine::Cpu(_) => DType::F32,
            RankMachine::Cuda(_) | RankMachine::Process(_) => DType::Bf16,
        };
        let spec = AttentionSpec {
            gradient_shares: arguments.planning.gradient_shares,
            ..AttentionSpec::new(heads_q, heads_kv, sizes.head_dim, dtype)
        };
        // Inputs do not depend on the mask; they need one for its length.
        let longest = masks::load(MaskPreset::Full, tokens * sizes.cp_size)?;
        let pass = if arguments.forward_only { Pass::Forward } else { Pass::ForwardBackward };
        let inputs = random_inputs(&longest, &spec, tokens as u64, pass);
        let profile = ranks.profile(arguments.planning.profile.as_deref())?;
        let mut overlaps = Vec::new();
        for &overlap in &arguments.overlap.0 {
            if !overlaps.contains(&overlap) {
                overlaps.push(overlap);
            }
        }
        Ok(Self { arguments, ranks, topology, tokens, spec, inputs, profile, overlaps })
    }

    fn measure(
        &self,
        masks: &[MaskPreset],
        traced: &mut Vec<Traced>,
        peers: &mut Peers<PeerResult>,
    ) -> Result<(Section, Vec<PeerRow>), CliError> {
        let mut peer_rows = Vec::new();
        let mut section = Section::new(format!(
            "distributed attention, {} tokens a rank, {}, {}; vs baseline: the same on one rank{}",
            self.tokens,
            self.ranks.name(),
            self.policies_text(),
            match self.ranks {
                RankMachine::Cuda(machine) if machine.devices().len() > 1 => ", the slowest GPU's",
                RankMachine::Process(_) => ", the first rank's GPU",
                RankMachine::Cuda(_) | RankMachine::Cpu(_) => "",
            }
        ));
        let progress = Progress::new();
        for &name in masks {
            let mask = masks::load(name, self.inputs.q.rows())?;
            progress.step(name.name().to_owned());
            let alone = self.planned(&mask, Topology::flat(1), Exchange::Flat, self.overlaps[0])?;
            let mut variants = vec![self.variant(alone, true)?];
            for &exchange in self.exchanges() {
                let first = variants.len();
                // What the others are judged by, whether it is asked for or not.
                for (overlap, is_asked) in
                    self.overlaps.iter().map(|one| (*one, true)).chain([(SEQUENTIAL, false)])
                {
                    let planned = self.planned(&mask, self.topology, exchange, overlap)?;
                    if variants[first..].iter().all(|variant| !variant.runs_by(planned.policies)) {
                        variants.push(self.variant(planned, is_asked)?);
                    }
                }
            }
            peers.prepare(&peers::case(name, self.tokens));
            self.run(Pass::Forward, &mut variants, peers)?;
            if !self.arguments.forward_only {
                self.run(Pass::ForwardBackward, &mut variants, peers)?;
            }
            let finished: Vec<_> =
                variants.into_iter().map(|variant| self.finish(&mask, variant)).collect::<Result<_, _>>()?;
            let mut finished = finished.into_iter();
            let alone = finished.next().flatten();
            let mut cases: Vec<Case> = finished.flatten().collect();
            for alike in cases.chunk_by_mut(Case::crosses_alike) {
                Case::judge(alike, OverlapPolicy::SEQUENTIAL.into());
            }
            cases.retain(Case::is_asked);
            let Some(alone) = alone else { continue };
            for pass in [Pass::Forward, Pass::ForwardBackward] {
                let together = cases.iter().map(|case| case.row(self, name, pass, Some(&alone)));
                let fastest =
                    together.clone().flatten().map(|(row, ..)| row).filter(|row| row.verified.passed());
                let fastest = fastest.min_by(|a, b| a.seconds.median.total_cmp(&b.seconds.median));
                peer_rows.extend(fastest.iter().flat_map(|ours| peers::rows(peers, pass, ours, self.tokens)));
                for (row, detail, check) in together.chain([alone.row(self, name, pass, None)]).flatten() {
                    section.add(row, detail, check);
                }
                for (finding, timelines) in cases.iter().filter_map(|case| case.finding(self, name, pass)) {
                    section.findings.push(finding);
                    traced.extend(self.arguments.trace.is_some().then_some(timelines));
                }
            }
            for case in &cases {
                section.findings.extend(case.traffic_text(self, name));
                section.findings.extend(case.inter_node_text(self, name));
                section.wrong.extend(case.miscounted(name));
            }
        }
        Ok((section, peer_rows))
    }

    /// How rows cross: on one node there is one variant.
    fn exchanges(&self) -> &[Exchange] {
        let all = &self.arguments.exchange[..];
        if self.topology.nodes() > 1 { all } else { &all[..1] }
    }

    fn policies_text(&self) -> String {
        self.overlaps.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    /// What distinguishes rows of one policy from those of another.
    fn policy_text(&self, asked: PassOverlaps, policies: PassPolicies) -> String {
        match (self.overlaps.len(), asked.to_string() == policies.to_string()) {
            (1, _) => String::new(),
            (_, true) => format!(", {policies}"),
            (_, false) => format!(", {asked}: {policies}"),
        }
    }

    /// What distinguishes rows of one exchange from those of another.
    fn exchange_text(&self, exchange: Exchange) -> &'static str {
        match exchange {
            _ if self.topology.nodes() == 1 => "",
            Exchange::TwoLevel => ", two-level",
            Exchange::Flat => ", flat",
        }
    }

    /// Plans; rows cross between several nodes as `exchange` says.
    fn solve(
        &self,
        mask: &Mask,
        topology: Topology,
        exchange: Exchange,
    ) -> Result<(Solution, PlanConfig), CliError> {
        let planning = &self.arguments.planning;
        let config = PlanConfig {
            chunk_size: planning.chunk_size,
            dispatch: planning.dispatch.named(),
            stages: planning.stages,
            query_exchange: planning.query_exchange_of(topology.world_size, self.arguments.deterministic),
            topology,
            cost: self.ranks.cost(&self.spec, topology.world_size, self.profile.as_ref()),
        };
        let solution = Solution::solve(
            mask,
            &self.spec,
            &config,
            (planning.dispatch, self.ranks.name()),
            &Planning::ALONE,
        )?;
        let over_nodes = topology.nodes() > 1 && exchange == Exchange::TwoLevel;
        Ok((if over_nodes { solution.over_nodes(&topology) } else { solution }, config))
    }

    fn reduction(&self) -> GradientReduction {
        match self.arguments.deterministic {
            true => GradientReduction::Deterministic,
            false => GradientReduction::PerStage,
        }
    }
}
