//! The `counterpoint` binary.

use counterpoint_cli::ReportingAllocator;

#[global_allocator]
static ALLOCATOR: ReportingAllocator = ReportingAllocator;

fn main() {
    counterpoint_cli::run()
}
