//! The selftest of attention: every case against f64 on each device, some repeated for their bits.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use counterpoint_choose::{PlanConfig, StageCount, plan_mask};
use counterpoint_exec::{AttentionInputs, AttentionOutputs, ExecError, HostTensor, Pass};
use counterpoint_plan::{DType, Plan};
use rayon::prelude::*;
use serde::{Deserialize, Deserializer, Serialize};

use super::{Case, Extent, Share, Subject, SubjectError};
use crate::attention::plain_attention_from;
use crate::check::check_against;
use crate::{CheckReport, Reference, plain_attention, reference_attention};

/// What one check found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelfCheck {
    /// What was checked, with what is special about it.
    pub name: String,
    /// Repeats it.
    pub seed: u64,
    /// Whether it held.
    pub passed: bool,
    /// The error that is nearest to its bound, or furthest past it; for bits, how many elements differ.
    #[serde(deserialize_with = "number_or_infinite")]
    pub error: f64,
    /// The largest error allowed.
    pub bound: f64,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl SelfCheck {
    /// A check that holds when `error` is at most `bound`. Not a number is not.
    pub fn of(name: String, seed: u64, error: f64, bound: f64) -> Self {
        Self { name, seed, passed: error <= bound, error, bound, reason: None }
    }

    /// A report's figure that is nearest to its bound, or furthest past it.
    pub fn of_report(name: String, seed: u64, report: &CheckReport) -> SelfCheck {
        let figures = report.tensors.iter().flat_map(|tensor| {
            let largest = tensor.max_abs_bound.map(|bound| (tensor.max_abs_error, bound));
            [Some((tensor.relative_error, tensor.relative_bound)), largest].into_iter().flatten()
        });
        // A bound of 0 is met by an error of 0 only.
        let share = |&(error, bound): &(f64, f64)| {
            if error <= bound { error / bound.max(f64::MIN_POSITIVE) } else { f64::max(1.0, error / bound) }
        };
        let worst = figures.max_by(|a, b| share(a).total_cmp(&share(b)));
        let (error, bound) = worst.unwrap_or((f64::INFINITY, 0.0));
        let check = SelfCheck { passed: report.passed, ..SelfCheck::of(name, seed, error, bound) };
        check.because(|| report.failures())
    }

    /// A check that could not be made.
    pub fn failed(name: String, seed: u64, reason: String) -> Self {
        Self { name, seed, passed: false, error: f64::INFINITY, bound: 0.0, reason: Some(reason) }
    }

    fn because(mut self, reason: impl FnOnce() -> String) -> Self {
        if !self.passed {
            self.reason = Some(reason());
        }
        self
    }
}

/// JSON has no infinity; an error that is none of its numbers is written as `null`.
fn number_or_infinite<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::INFINITY))
}

/// References waiting for the device; each holds a few megabytes.
const WAITING: usize = 32;
/// Of the cases that are not deterministic, one in so many runs twice: the bits of its forward must be the same.
const REPEATED: usize = 4;

/// Runs the cases of an extent and a share on each of several devices, which take the same types, and compares each with the f64
/// reference, which is computed once for all of them; repeats some and compares bits. Ends early, with a failed check, where a
/// run does not come to its end: the ones after it would wait as long. Gives the checks of each subject in the order of cases.
/// `on_check` hears of every check as it is made, with how many cases there are.
///
/// # Panics
/// When there is no subject, or they take different types.
pub fn selftest_attention(
    subjects: &[&dyn Subject],
    extent: Extent,
    share: Share,
    mut on_check: impl FnMut(&SelfCheck, usize),
) -> Vec<Vec<SelfCheck>> {
    let dtypes = subjects[0].dtypes();
    assert!(subjects.iter().all(|subject| subject.dtypes() == dtypes), "subjects that take the same types");
    let cases: Vec<(usize, Case)> =
        Case::all(extent, dtypes).into_iter().enumerate().filter(|(index, _)| share.takes(*index)).collect();
    let count = cases.len() * subjects.len();
    let mut checks: Vec<(usize, Vec<Vec<SelfCheck>>)> = Vec::with_capacity(cases.len());
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stopped = &stopped;
        // The device is driven from this thread alone: workers that block on a full channel hold nothing that it needs.
        let (sender, receiver) = sync_channel(WAITING);
        // Threads of their own: while they block on a full channel, this thread may need those of the global pool.
        let prepare = move || {
            cases.into_par_iter().for_each(|(index, case)| {
                if !stopped.load(Ordering::Relaxed) {
                    // Nobody receives any more once the device has stalled.
                    let _ = sender.send((index, Expected::of(case)));
                }
            });
        };
        match rayon::ThreadPoolBuilder::new().num_threads(share.threads()).build() {
            Ok(pool) => drop(scope.spawn(move || pool.install(prepare))),
            Err(error) => {
                let check = SelfCheck::failed("threads for references".to_owned(), 0, error.to_string());
                on_check(&check, count);
                checks.push((0, vec![vec![check]; subjects.len()]));
                return;
            }
        }
        for (index, expected) in receiver {
            let mut of_case = vec![Vec::new(); subjects.len()];
            let from_out = FromOut::default();
            for (subject, place) in subjects.iter().zip(&mut of_case) {
                let (found, end) = examine(*subject, &expected, &from_out, index);
                found.iter().for_each(|check| on_check(check, count));
                *place = found;
                if end == DeviceState::Stalled {
                    stopped.store(true, Ordering::Relaxed);
                    break;
                }
            }
            checks.push((index, of_case));
            if stopped.load(Ordering::Relaxed) {
                break;
            }
        }
    });
    checks.sort_by_key(|(index, _)| *index);
    let mut of_subjects = vec![Vec::new(); subjects.len()];
    for (_, of_case) in checks {
        of_subjects.iter_mut().zip(of_case).for_each(|(all, found)| all.extend(found));
    }
    of_subjects
}

/// A case with what must come out of it.
struct Expected {
    case: Case,
    inputs: AttentionInputs,
    reference: Reference,
    plain: Option<Reference>,
}

impl Expected {
    fn of(case: Case) -> Self {
        let inputs = case.inputs();
        let reference = reference_attention(&case.mask, &case.spec, &inputs);
        let narrow = matches!(case.spec.dtype, DType::Bf16 | DType::F16);
        let plain = narrow.then(|| plain_attention(&case.mask, &case.spec, &inputs));
        Self { case, inputs, reference, plain }
    }
}

/// The yardsticks by what runs gave as `out`: subjects that agree on it share one, which takes longer than a run.
#[derive(Default)]
struct FromOut(RefCell<Vec<(HostTensor, Rc<Reference>)>>);

impl FromOut {
    fn of(&self, expected: &Expected, out: &HostTensor) -> Rc<Reference> {
        let mut known = self.0.borrow_mut();
        if let Some((_, yardstick)) = known.iter().find(|(other, _)| unlike_elements(other, out) == 0) {
            return yardstick.clone();
        }
        let Expected { case, inputs, .. } = expected;
        let yardstick = Rc::new(plain_attention_from(&case.mask, &case.spec, inputs, out));
        known.push((out.clone(), yardstick.clone()));
        yardstick
    }
}

/// Whether more runs make sense.
#[derive(Clone, Copy, PartialEq)]
enum DeviceState {
    Answers,
    Stalled,
}

fn examine(
    subject: &dyn Subject,
    expected: &Expected,
    from_out: &FromOut,
    index: usize,
) -> (Vec<SelfCheck>, DeviceState) {
    let Expected { case, inputs, reference, plain } = expected;
    let name = case.describe();
    let failed = |name: String, error: SubjectError| {
        let state = match error {
            SubjectError::Run(ExecError::Stalled(_)) => DeviceState::Stalled,
            _ => DeviceState::Answers,
        };
        (SelfCheck::failed(name, case.seed, error.to_string()), state)
    };
    let plan = match plan_mask(&case.mask, &case.spec, &case.plan) {
        Ok(plan) => plan,
        Err(error) => {
            return (vec![SelfCheck::failed(name, case.seed, error.to_string())], DeviceState::Answers);
        }
    };
    let run = |plan: &Plan| subject.run(plan, &case.spec, inputs, &case.run);
    let outputs = match run(&plan) {
        Ok(outputs) => outputs,
        Err(error) => {
            let (check, state) = failed(name, error);
            return (vec![check], state);
        }
    };
    let references = (reference, plain.as_ref());
    let report = check_against(&case.spec, references, &outputs, |out| from_out.of(expected, out));
    let mut checks = vec![SelfCheck::of_report(name.clone(), case.seed, &report)];
    let mut state = DeviceState::Answers;
    let mut repeat = |name: String, plan: &Plan, pass: Pass| {
        checks.push(match run(plan) {
            Ok(again) => repeated(name, case.seed, pass, &outputs, &again),
            Err(error) => {
                let (check, found) = failed(name, error);
                state = found;
                check
            }
        });
    };
    if case.run.deterministic || index.is_multiple_of(REPEATED) {
        let pass = if case.run.deterministic { Pass::ForwardBackward } else { Pass::Forward };
        repeat(format!("same bits twice: {name}"), &plan, pass);
    }
    if case.run.deterministic && plan.cp_size() > 1 {
        let other = if plan.ranks[0].forward.len() == 2 { 3 } else { 1 };
        let other = PlanConfig { stages: StageCount::Fixed(other).into(), ..case.plan };
        if let Ok(plan) = plan_mask(&case.mask, &case.spec, &other) {
            repeat(format!("same bits in other stages: {name}"), &plan, subject.same_in_any_stages());
        }
    }
    (checks, state)
}

/// Whether two runs gave the same bits in the tensors of a pass.
fn repeated(
    name: String,
    seed: u64,
    pass: Pass,
    first: &AttentionOutputs,
    again: &AttentionOutputs,
) -> SelfCheck {
    let tensors = |of: &AttentionOutputs| {
        let forward = vec![("out", Some(of.out.clone())), ("lse", Some(of.lse.clone()))];
        let backward = [("dq", &of.dq), ("dk", &of.dk), ("dv", &of.dv), ("dsink", &of.dsink)];
        let backward = backward.into_iter().filter(|_| pass == Pass::ForwardBackward);
        forward.into_iter().chain(backward.map(|(name, tensor)| (name, tensor.clone()))).collect::<Vec<_>>()
    };
    let mut different = Vec::new();
    let mut count = 0;
    for ((tensor, first), (_, again)) in tensors(first).iter().zip(&tensors(again)) {
        let unlike = match (first, again) {
            (Some(first), Some(again)) => unlike_elements(first, again),
            (None, None) => 0,
            _ => 1,
        };
        count += unlike;
        if unlike > 0 {
            different.push(format!("{unlike} elements of {tensor} differ"));
        }
    }
    SelfCheck::of(name, seed, count as f64, 0.0).because(|| different.join("; "))
}

/// Elements of two tensors whose bits are not the same; all of them where the tensors are not of one shape and type.
pub fn unlike_elements(a: &HostTensor, b: &HostTensor) -> usize {
    if a.shape() != b.shape() || a.dtype() != b.dtype() {
        return a.len().max(b.len()).max(1);
    }
    let size = a.dtype().size();
    let elements = a.bytes().chunks_exact(size).zip(b.bytes().chunks_exact(size));
    elements.filter(|(a, b)| a != b).count()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use counterpoint_exec::{LinearConfig, LinearInputs, LinearOutputs, RunConfig, Stall};
    use counterpoint_plan::{AttentionSpec, LinearPlan};

    use super::*;
    use crate::selftest::CpuSubject;
    use crate::selftest::spoiled::{SharedRuns, Spoiled, shift};

    /// Every third case.
    fn third() -> Share {
        Share::each(3).last().unwrap()
    }

    type Spoil = fn(&mut AttentionOutputs, usize);

    /// What is found on a device for each way to spoil, with one reference for all of them, on a third of the cases: what fails is
    /// measured twice.
    fn failures<const N: usize>(spoils: [Spoil; N]) -> [Vec<SelfCheck>; N] {
        let runs = Arc::<SharedRuns>::default();
        let devices = spoils.map(|spoil| Spoiled::attention(spoil, runs.clone()));
        let subjects = devices.each_ref().map(|device| device as &dyn Subject);
        let found = selftest_attention(&subjects, Extent::Quick, third(), |_, _| ());
        let failed = |checks: Vec<SelfCheck>| {
            assert!(checks.len() > 8, "{}", checks.len());
            checks.into_iter().filter(|check| !check.passed).collect()
        };
        found.into_iter().map(failed).collect::<Vec<_>>().try_into().unwrap()
    }

    /// On a third of the cases, whose shares are every third share of nine: that the CPU passes all of them is a test of the command
    /// line's. A device that fails meanwhile gives a failed check for each case and leaves the other's as they are.
    #[test]
    fn the_cpu_passes_and_shares_are_the_whole_although_a_device_fails() {
        let broken = Broken(SubjectError::Overwrite("4 bytes".to_owned()));
        let mut heard = 0;
        let subjects: [&dyn Subject; 2] = [&CpuSubject, &broken];
        let found = selftest_attention(&subjects, Extent::Quick, third(), |_, _| heard += 1);
        let [mut whole, failed] = <[_; 2]>::try_from(found).unwrap();
        let wrong: Vec<_> = whole.iter().filter(|check| !check.passed).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert_eq!(heard, whole.len() + failed.len());
        for bits in ["same bits twice", "same bits in other stages"] {
            assert!(whole.iter().any(|check| check.name.starts_with(bits)), "{bits}");
        }
        assert!(failed.len() > 8 && failed.len() < whole.len(), "{} and {}", failed.len(), whole.len());
        assert!(failed.iter().all(|check| !check.passed && check.reason.is_some()));
        let mut parts = [Vec::new(), Vec::new()];
        for share in Share::each(9).skip(2).step_by(3) {
            let subjects: [&dyn Subject; 2] = [&broken, &CpuSubject];
            let found = selftest_attention(&subjects, Extent::Quick, share, |_, _| ());
            parts.iter_mut().zip(found).for_each(|(all, found)| all.extend(found));
        }
        let sort = |checks: &mut Vec<SelfCheck>| checks.sort_by_key(|check| (check.seed, check.name.clone()));
        sort(&mut whole);
        parts.iter_mut().for_each(sort);
        assert_eq!(parts[1], whole);
        assert_eq!(parts[0].len(), failed.len());
    }

    #[test]
    fn what_is_written_is_read_back() {
        let right = SelfCheck::of("causal".to_owned(), 7, 0.25, 0.5);
        let failed = SelfCheck::failed("window".to_owned(), 8, "out of memory".to_owned());
        for check in [right, failed] {
            let text = serde_json::to_string(&check).unwrap();
            assert_eq!(serde_json::from_str::<SelfCheck>(&text).unwrap(), check, "{text}");
        }
    }

    #[test]
    fn one_wrong_element_of_any_tensor_is_found_and_bits_that_change() {
        let [right, bits, wrong @ ..] = failures([
            |_, _| (),
            // Too little to be out of bounds.
            |outputs, run| {
                if run % 2 == 1 {
                    shift(&mut outputs.lse, 1e-7);
                }
            },
            |outputs, _| shift(&mut outputs.out, 0.5),
            |outputs, _| shift(&mut outputs.lse, 0.5),
            |outputs, _| outputs.dq.iter_mut().for_each(|tensor| shift(tensor, 0.5)),
            |outputs, _| outputs.dk.iter_mut().for_each(|tensor| shift(tensor, 1.0)),
            |outputs, _| outputs.dv.iter_mut().for_each(|tensor| shift(tensor, 1.0)),
            |outputs, _| outputs.out = HostTensor::zeros(outputs.out.shape().to_vec(), outputs.out.dtype()),
            |outputs, _| shift(&mut outputs.out, f64::NAN),
        ]);
        assert!(right.is_empty(), "{right:#?}");
        assert!(!bits.is_empty());
        assert!(bits.iter().all(|check| check.name.starts_with("same bits")), "{bits:#?}");
        for (index, found) in wrong.iter().enumerate() {
            assert!(found.len() > 3, "{index}: {}", found.len());
            assert!(found.iter().all(|check| check.reason.is_some()));
        }
    }

    /// Another way round, the same problems: a seed stands for its case.
    #[test]
    fn cases_are_the_same_every_time() {
        let describe = || {
            let cases = Case::all(Extent::Full, &[DType::Bf16, DType::F16]);
            cases.iter().map(|case| (case.describe(), case.mask.clone())).collect::<Vec<_>>()
        };
        let cases = describe();
        assert!(cases.len() > 280, "{}", cases.len());
        assert!(cases == describe());
        // What the issue of every kernel is: the draw must not miss it.
        let empty_rows = cases.iter().filter(|(_, mask)| has_empty_row(mask)).count();
        assert!(empty_rows > 80, "{empty_rows}");
        for feature in
            ["softcap", "sink", "ranks=", "stages=", "deterministic", "scale=-", "hd40", "8:1", " 1x"]
        {
            let count = cases.iter().filter(|(name, _)| name.contains(feature)).count();
            assert!(count >= 2, "{feature}: {count}");
        }
    }

    fn has_empty_row(mask: &counterpoint_mask::Mask) -> bool {
        let bands: Vec<_> = mask.bands().collect();
        (0..mask.seqlen_q()).any(|row| {
            bands.iter().all(|band| {
                row < band.q_range.start || row >= band.q_range.end || band.columns(row).is_empty()
            })
        })
    }

    /// A device that gives nothing but this error.
    struct Broken(SubjectError);

    impl Subject for Broken {
        fn device(&self) -> String {
            "broken".to_owned()
        }

        fn dtypes(&self) -> &[DType] {
            CpuSubject.dtypes()
        }

        fn same_in_any_stages(&self) -> Pass {
            Pass::ForwardBackward
        }

        fn run(
            &self,
            _: &Plan,
            _: &AttentionSpec,
            _: &AttentionInputs,
            _: &RunConfig,
        ) -> Result<AttentionOutputs, SubjectError> {
            Err(self.0.clone())
        }

        fn run_linear(
            &self,
            _: &LinearPlan,
            _: &LinearInputs,
            _: &LinearConfig,
        ) -> Result<LinearOutputs, SubjectError> {
            Err(self.0.clone())
        }

        fn run_experts(
            &self,
            _: counterpoint_exec::ExpertOptions,
            _: &std::sync::Arc<counterpoint_plan::Routing>,
            _: &counterpoint_exec::ExpertInputs,
            _: counterpoint_exec::WorldConfig,
        ) -> Result<counterpoint_exec::ExpertOutputs, SubjectError> {
            Err(self.0.clone())
        }

        fn run_alone(
            &self,
            _: &counterpoint_schedule::Program,
            _: &[&HostTensor],
        ) -> Result<Vec<HostTensor>, SubjectError> {
            Err(self.0.clone())
        }
    }

    /// Each further run would wait for its limit.
    #[test]
    fn a_run_that_never_ends_is_the_last() {
        let stall = Stall {
            rank: 0,
            place: "kernel".to_owned(),
            awaited: "the device".to_owned(),
            waited: Duration::from_secs(30),
            evidence: String::new(),
            culprit: 0,
            culprit_doing: String::new(),
        };
        let broken = Broken(ExecError::Stalled(Box::new(stall)).into());
        let checks = selftest_attention(&[&broken], Extent::Quick, third(), |_, _| ()).remove(0);
        assert_eq!(checks.len(), 1);
        assert!(!checks[0].passed);
    }
}
