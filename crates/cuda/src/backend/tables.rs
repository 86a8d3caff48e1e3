//! Tables of Programs for GPUs: what is searched for their attention operations, in processes that may have no GPU.

use std::collections::BTreeMap;

use counterpoint_exec::{DescribedDevice, DeviceFault, ExecError};
use counterpoint_schedule::{Op, Program};
use serde::{Deserialize, Serialize};

use super::attention_problem::{BackwardProblem, ForwardProblem, OperationOf};
use super::exec_error;
use crate::kernel::{BackwardTables, ForwardTables};
use crate::{CudaError, DescribedGpu};

/// Tables of a Program, by the places of its operations. Those without a tile schedule have none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaTables {
    forward: BTreeMap<usize, ForwardTables>,
    backward: BTreeMap<usize, BackwardTables>,
}

impl CudaTables {
    /// Those of a stage of the forward.
    pub(super) fn forward(&self, of: OperationOf<'_>) -> Result<&ForwardTables, ExecError> {
        self.forward.get(&of.index).ok_or_else(|| missing(of))
    }

    /// Those of a stage of the backward.
    pub(super) fn backward(&self, of: OperationOf<'_>) -> Result<&BackwardTables, ExecError> {
        self.backward.get(&of.index).ok_or_else(|| missing(of))
    }
}

fn missing(of: OperationOf<'_>) -> ExecError {
    let (rank, place) = (of.program.rank, format!("the preparation of `{}`", of.label()));
    ExecError::Device { rank, place, reason: DeviceFault::NoTables }
}

impl DescribedDevice for DescribedGpu {
    const KIND: &'static str = "a GPU";
    type Tables = CudaTables;

    fn tables(&self, program: &Program) -> Result<CudaTables, ExecError> {
        let mut tables = CudaTables::default();
        for (index, op) in program.ops.iter().enumerate() {
            let of = OperationOf { program, index };
            let checked =
                || program.check_operands(index).map_err(|fault| ExecError::program(program, fault));
            let failed = |error: CudaError| {
                exec_error(program.rank, &format!("the preparation of `{}`", of.label()), error)
            };
            match op.op.computation() {
                Op::AttentionForward(op) => {
                    checked()?;
                    let ForwardProblem { problem, mode, .. } = ForwardProblem::new(of, op, self.arch)?;
                    let made = ForwardTables::new(self, &problem, mode).map_err(failed)?;
                    tables.forward.insert(index, made);
                }
                Op::AttentionBackward(op) => {
                    checked()?;
                    let BackwardProblem { problem, mode, .. } = BackwardProblem::new(of, op, self.arch)?;
                    let made = BackwardTables::new(self, &problem, mode).map_err(failed)?;
                    tables.backward.insert(index, made);
                }
                _ => {}
            }
        }
        Ok(tables)
    }
}
