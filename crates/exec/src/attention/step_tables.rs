//! Step tables: what a rank's device needs of a plan, made ahead and handed over as bytes, with what they belong to.

use counterpoint_schedule::Program;
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};

use crate::{DescribedDevice, ExecError, PlanIdentity, TablesFault};

/// What is searched for attention of a plan on one rank and a device like the rank's. Whoever has none makes them: the process that
/// trains, on any of its threads, or another one, which has no device.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTables<D: DescribedDevice>(Content<D>);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
struct Content<D: DescribedDevice> {
    rank: usize,
    device: D,
    plan: PlanIdentity,
    /// Of the forward, and of the backward where there is one.
    programs: Vec<D::Tables>,
}

/// Where tables are for, in words.
#[derive(Serialize, Deserialize)]
struct Place {
    kind: String,
    device: String,
}

/// Bytes begin with it.
const MAGIC: &[u8; 4] = b"CPST";
/// Counts up when tables of the same plan change, or the way in which they are written: a test knows the bytes of this one.
const FORMAT: u32 = 1;
/// Bytes of the checksum, behind magic and version.
const CHECKSUM: usize = 8;

/// This one, as tables name who made them.
fn version() -> String {
    format!("{} (tables {FORMAT})", env!("CARGO_PKG_VERSION"))
}

impl<D: DescribedDevice> StepTables<D> {
    pub(super) fn of_programs(
        device: &D,
        programs: &[Program],
        plan: &PlanIdentity,
    ) -> Result<Self, ExecError> {
        let rank = programs.first().map_or(0, |program| program.rank);
        let programs = programs.iter().map(|program| device.tables(program)).collect::<Result<_, _>>()?;
        Ok(Self(Content { rank, device: device.clone(), plan: plan.clone(), programs }))
    }

    /// The rank whose they are.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Those of each Program.
    pub(super) fn programs(&self) -> &[D::Tables] {
        &self.0.programs
    }

    /// Whether they are this rank's, on its device, of so many passes of this plan.
    pub(super) fn check(
        &self,
        rank: usize,
        device: &D,
        plan: &PlanIdentity,
        passes: usize,
    ) -> Result<(), TablesFault> {
        let content = &self.0;
        if content.rank != rank {
            return Err(TablesFault::Rank { theirs: content.rank });
        }
        if content.device != *device {
            let [theirs, own] = [&content.device, device].map(ToString::to_string);
            return Err(TablesFault::Device { theirs, own });
        }
        if let Some(difference) = plan.difference(&content.plan) {
            let crate::PlanDifference { what, own, other } = difference;
            return Err(TablesFault::Plan { what, theirs: other, own });
        }
        if content.programs.len() != passes {
            return Err(TablesFault::Pass { theirs: content.programs.len(), own: passes });
        }
        Ok(())
    }

    /// All of them as bytes, for another process of the same version.
    pub fn to_bytes(&self) -> Vec<u8> {
        let version = version();
        let mut bytes = MAGIC.to_vec();
        bytes.push(version.len() as u8);
        bytes.extend_from_slice(version.as_bytes());
        // What others, whose devices are of another kind, read of it comes first.
        let place = Place { kind: D::KIND.to_owned(), device: self.0.device.to_string() };
        let content = postcard::serialize_with_flavor(&(place, &self.0), Gathered(Vec::new()))
            .expect("tables serialise: their lists have known lengths, and memory takes all bytes");
        bytes.extend_from_slice(&checksum(&content));
        bytes.extend_from_slice(&content);
        bytes
    }

    /// The inverse of [`StepTables::to_bytes`]. Memory is bounded by that of the bytes.
    ///
    /// # Errors
    /// [`TablesFault`] for bytes that this version has not made, or that are not as they were.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TablesFault> {
        let unknown = TablesFault::Unknown { bytes: bytes.len() };
        let Some((&length, rest)) = bytes.strip_prefix(MAGIC).and_then(<[u8]>::split_first) else {
            return Err(unknown);
        };
        let damaged = TablesFault::Damaged { bytes: bytes.len() };
        let (Some(theirs), Some(rest)) = (rest.get(..length as usize), rest.get(length as usize..)) else {
            return Err(damaged);
        };
        let own = version();
        if theirs != own.as_bytes() {
            return Err(TablesFault::Version { theirs: String::from_utf8_lossy(theirs).into_owned(), own });
        }
        match rest.split_at_checked(CHECKSUM) {
            Some((said, content)) if said == checksum(content) => {
                let Ok((place, content)) = postcard::take_from_bytes::<Place>(content) else {
                    return Err(damaged);
                };
                if place.kind != D::KIND {
                    let own = D::KIND.to_owned();
                    return Err(TablesFault::Device { theirs: place.device, own });
                }
                postcard::from_bytes(content).map(Self).map_err(|_| damaged)
            }
            _ => Err(damaged),
        }
    }
}

/// FNV-1a over words of eight bytes: what was changed on the way is found at the speed of memory. Every step can be undone, so that a
/// change of one word always shows.
fn checksum(content: &[u8]) -> [u8; CHECKSUM] {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let (words, rest) = content.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let length = content.len().to_le_bytes();
    let words = words.iter().chain([&last, &length]);
    words.fold(BASIS, |hash, word| (hash ^ u64::from_le_bytes(*word)).wrapping_mul(PRIME)).to_le_bytes()
}

/// What is serialised, in memory.
struct Gathered(Vec<u8>);

impl Flavor for Gathered {
    type Output = Vec<u8>;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}
