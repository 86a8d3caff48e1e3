// A stream's word to a kernel that runs: all that was enqueued on the stream before is done. The kernel acquires the word and reads what
// that has written; it lowers the word itself.
#pragma once

#include "ptx/flag.cuh"

namespace counterpoint {

// One thread. What earlier kernels and copies of its stream wrote comes before it, and so before what it releases.
__device__ __forceinline__ void signal_raise(u32* word) { add_release(word, 1); }

}  // namespace counterpoint
