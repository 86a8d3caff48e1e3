//! Kinds of devices as they are shipped: what work costs on them, one data file each in `models`.

use std::sync::LazyLock;

use counterpoint_cost::CostModel;
use counterpoint_schedule::OpCost;
use serde::{Deserialize, Serialize};

/// The version of the files. It changes with the meaning of a field.
pub const DEVICE_MODEL_VERSION: u32 = 1;

/// What work costs on a kind of device. Choices that change the bits of results follow it, and never a measurement: they are the same
/// on every machine of the kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceModel {
    /// [`DEVICE_MODEL_VERSION`] of the file.
    pub version: u32,
    /// The kind, for people.
    pub device: String,
    /// What the names of such machines begin with.
    pub names: Vec<String>,
    /// Where the figures are from, for people.
    pub source: String,
    /// The figures.
    pub cost: CostModel,
}

/// Files that were not read are none: a test reads them all.
static MODELS: LazyLock<Vec<DeviceModel>> = LazyLock::new(|| {
    let files: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/models.rs"));
    files.iter().filter_map(|(_, text)| serde_json::from_str(text).ok()).collect()
});

/// Of GPUs that no file is of.
static H200: LazyLock<DeviceModel> = LazyLock::new(|| named("NVIDIA H200", CostModel::H200));
/// Of machines without tiles.
static CPU: LazyLock<DeviceModel> = LazyLock::new(|| named("CPU", CostModel::CPU));

fn named(device: &str, otherwise: CostModel) -> DeviceModel {
    let found = MODELS.iter().find(|model| model.device == device).cloned();
    found.unwrap_or_else(|| DeviceModel {
        version: DEVICE_MODEL_VERSION,
        device: device.to_owned(),
        names: Vec::new(),
        source: String::new(),
        cost: otherwise,
    })
}

impl DeviceModel {
    /// All that are shipped, by the names of their files.
    pub fn all() -> &'static [Self] {
        &MODELS
    }

    /// That of a machine of this name, such as `NVIDIA H200`; where names of several begin it, that of the longest.
    pub fn of_machine(name: &str) -> Option<&'static Self> {
        Self::of_name(&MODELS, name)
    }

    fn of_name<'a>(models: &'a [Self], name: &str) -> Option<&'a Self> {
        let begun = |model: &Self| {
            let starts = model.names.iter().filter(|start| name.starts_with(start.as_str()));
            starts.map(String::len).max()
        };
        let begun = models.iter().filter_map(|model| Some((begun(model)?, model)));
        begun.max_by_key(|(length, _)| *length).map(|(_, model)| model)
    }

    /// What choices follow on a machine of this name and cost, where no file is of the name: an H200 where kernels compute tiles, else a
    /// CPU. Of `cost` nothing else is looked at.
    pub fn for_choices(name: &str, cost: &CostModel) -> &'static Self {
        let usual = || if cost.tiles.is_some() { &*H200 } else { &*CPU };
        Self::of_machine(name).unwrap_or_else(usual)
    }
}

impl OpCost for DeviceModel {
    fn rates(&self) -> &CostModel {
        &self.cost
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_cost::MachineProfile;

    use super::*;

    #[test]
    fn every_file_is_a_model_of_its_own() {
        let files: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/models.rs"));
        assert!(files.len() >= 4, "{}", files.len());
        for (file, text) in files {
            let model: DeviceModel =
                serde_json::from_str(text).unwrap_or_else(|error| panic!("{file}: {error}"));
            assert_eq!(model.version, DEVICE_MODEL_VERSION, "{file}");
            assert_eq!(model.cost.validate(), Ok(()), "{file}");
            assert!(!model.source.is_empty(), "{file}");
            for name in &model.names {
                assert_eq!(DeviceModel::of_machine(name), Some(&model), "{file}");
            }
        }
        assert_eq!(DeviceModel::all().len(), files.len());
    }

    /// A kind whose name goes on where another's ends is found, wherever its file stands.
    #[test]
    fn the_longest_name_counts() {
        let model = |name: &str| DeviceModel { names: vec![name.to_owned()], ..H200.clone() };
        let mut models = vec![model("NVIDIA H200"), model("NVIDIA H200 NVL"), model("NVIDIA H20")];
        for _ in 0..models.len() {
            models.rotate_left(1);
            for name in ["NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H20"] {
                let full = format!("{name} of 141 GB");
                assert_eq!(DeviceModel::of_name(&models, &full).unwrap().names, [name]);
            }
        }
        assert_eq!(DeviceModel::of_name(&models, "NVIDIA H2"), None);
    }

    #[test]
    fn machines_find_their_kind() {
        let device = |name, cost: &CostModel| DeviceModel::for_choices(name, cost).device.as_str();
        let tiles = CostModel::H200;
        let plain = CostModel { tiles: None, ..tiles };
        assert_eq!(device("NVIDIA H100 80GB HBM3", &tiles), "NVIDIA H100 SXM");
        assert_eq!(device("NVIDIA A100-SXM4-80GB", &tiles), "NVIDIA A100 SXM");
        // A name that no GPU has, so that a new file changes nothing here.
        assert_eq!(device("NVIDIA of no kind", &tiles), "NVIDIA H200");
        assert_eq!(device("AMD EPYC", &plain), "CPU");
        // What is built in is what the files say.
        assert_eq!(DeviceModel::for_choices("AMD EPYC", &plain).cost, CostModel::CPU);
        assert_eq!(DeviceModel::of_machine("NVIDIA H200").unwrap().cost, MachineProfile::h200().cost);
    }
}
