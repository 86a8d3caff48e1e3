//! Memory that the system refuses ends the process with a sentence and status 3; the language's own end is an abort with a backtrace.
#![allow(
    unsafe_code,
    reason = "an allocator is unsafe by its trait; it adds a look at what the system's gives"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_int;
use std::fmt;
use std::hint;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::Duration;

use counterpoint_console::interrupt;

/// The system's allocator, which prints an error when it has no more once the process is this program's ([`crate::run`]).
#[derive(Debug)]
pub struct ReportingAllocator;

static REPORTS: AtomicBool = AtomicBool::new(false);

/// From now on memory that the system refuses ends the process.
pub(crate) fn report_failures() {
    REPORTS.store(true, Ordering::Relaxed);
}

/// The machine lacks what was asked for.
const EXHAUSTED: i32 = 3;

// SAFETY: whatever is given comes from the system's allocator, called with what the caller promises.
unsafe impl GlobalAlloc for ReportingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        given(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn given(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() && REPORTS.load(Ordering::Relaxed) {
        end_of_memory(bytes);
    }
    memory
}

thread_local! {
    /// Whether this thread is already ending the process.
    static ENDING: Cell<bool> = const { Cell::new(false) };
}

#[cold]
fn end_of_memory(bytes: usize) -> ! {
    if ENDING.replace(true) {
        // What is left to be done needs memory itself.
        signal_hook::low_level::exit(EXHAUSTED);
    }
    give_reserve_back();
    let mut line = Line { text: [0; 200], used: 0 };
    let _ = fmt::Write::write_fmt(
        &mut line,
        format_args!(
            "error: {bytes} more bytes of memory could not be had; see what `ulimit -v`, the control group and other programs leave\n"
        ),
    );
    interrupt::end_soon(line.text(), EXHAUSTED, Duration::from_secs(1))
}

/// Text without memory of its own, cut where it is too long.
struct Line {
    text: [u8; 200],
    used: usize,
}

impl Line {
    fn text(&self) -> &str {
        // Cut within a character only where the sentence itself would be too long.
        str::from_utf8(&self.text[..self.used]).unwrap_or_default()
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.text[self.used..];
        let taken = text.len().min(room.len());
        room[..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.used += taken;
        Ok(())
    }
}

/// Where `ulimit -v` limits the process: takes the stack of this thread at once, since a stack that may not grow ends the process
/// without a word, and has threads share the places that they take memory from: by default each of them would set aside 64 MiB of
/// addresses for itself, and what is left would not hold the tensors.
pub(crate) fn prepare_for_an_address_limit() {
    let Some(left) = counterpoint_exec::address_space_left() else { return };
    if left < LEAST_ADDRESSES {
        interrupt::end_soon(
            "error: `ulimit -v` leaves this program no memory beyond its own code; raise it\n",
            EXHAUSTED,
            Duration::ZERO,
        );
    }
    take_stack();
    // SAFETY: it has a size.
    RESERVE.store(unsafe { System.alloc(RESERVED) }, Ordering::Relaxed);
    // SAFETY: it takes two numbers, and no other thread runs yet.
    unsafe { mallopt(M_ARENA_MAX, 1) };
}

/// Memory for the end of a process that has no more: the system's library takes some without asking this allocator, and aborts where
/// there is none.
static RESERVE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// Large enough to be the system's again when it is given back.
const RESERVED: Layout = Layout::new::<[u8; 1 << 19]>();

fn give_reserve_back() {
    let reserve = RESERVE.swap(ptr::null_mut(), Ordering::Relaxed);
    if !reserve.is_null() {
        // SAFETY: it was allocated with this layout, and nothing else has it any more.
        unsafe { System.dealloc(reserve, RESERVED) };
    }
}

/// What the main thread needs of its stack, three times what any command was seen to take.
const STACK: usize = 1 << 20;

/// The stack, and something to work with.
const LEAST_ADDRESSES: u64 = 2 * STACK as u64;

#[inline(never)]
fn take_stack() {
    hint::black_box(&mut [0_u8; STACK]);
}

/// From `malloc.h`.
const M_ARENA_MAX: c_int = -8;

// SAFETY: the C library has it, with these arguments.
unsafe extern "C" {
    fn mallopt(parameter: c_int, value: c_int) -> c_int;
}
