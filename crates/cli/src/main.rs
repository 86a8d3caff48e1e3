//! The `counterpoint` binary.

use counterpoint_cli::TellingAllocator;

#[global_allocator]
static ALLOCATOR: TellingAllocator = TellingAllocator;

fn main() {
    counterpoint_cli::run()
}
