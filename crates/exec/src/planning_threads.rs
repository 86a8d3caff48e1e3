//! Threads that a caller keeps to plan with.

use counterpoint_plan::{Helpers, Planning};
use rayon::ThreadPool;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use crate::ExecError;
use crate::cpu::new_pool;

/// Threads that plan side by side for whoever has them. They are the caller's own, and end when this goes.
#[derive(Debug)]
pub struct PlanningThreads(Option<ThreadPool>);

impl PlanningThreads {
    /// So many threads, for which whoever plans with them waits; none where one is enough, which is the caller's.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives none.
    pub fn new(count: usize) -> Result<Self, ExecError> {
        (count > 1).then(|| new_pool(count, "planner")).transpose().map(Self)
    }

    /// Planning with them.
    pub fn planning(&self) -> Planning<'_> {
        match self.0 {
            Some(_) => Planning::ALONE.with_helpers(self),
            None => Planning::ALONE,
        }
    }
}

impl Helpers for PlanningThreads {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        match &self.0 {
            Some(pool) => pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(task)),
            None => (0..tasks).for_each(task),
        }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_choose::{PlanConfig, plan_mask, plan_mask_within};
    use counterpoint_mask::Mask;
    use counterpoint_plan::{AttentionSpec, DType};

    use super::*;

    #[test]
    fn threads_make_the_plan_that_one_makes() {
        let mask = Mask::causal(16 << 10).unwrap();
        let (spec, config) = (AttentionSpec::new(8, 2, 64, DType::Bf16), PlanConfig::new(4));
        let alone = plan_mask(&mask, &spec, &config).unwrap();
        for count in [0, 1, 3] {
            let threads = PlanningThreads::new(count).unwrap();
            let helped = plan_mask_within(&mask, &spec, &config, u64::MAX, &threads.planning());
            assert_eq!(helped, Ok(alone.clone()));
        }
    }
}
