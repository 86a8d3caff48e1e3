// y = x sigmoid(x), part by part: what a kernel of one's own looks like that lets its results travel while it goes on.
#include "user_kernel.cuh"

using namespace counterpoint;

extern "C" __global__ void silu(const __grid_constant__ UserCall call) {
  for (u32 part = 0; part < call.part_count; ++part) {
    // What the part reads comes first, then what it writes.
    const float* x = user_tensor<const float>(call, part, 0);
    float* y = user_tensor<float>(call, part, 1);
    const u64 count = call.parts[part].tensors[1].elements;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
      y[i] = x[i] / (1.0f + __expf(-x[i]));
    }
    // By every thread of every block: those who wait for the part go on once all blocks have raised it.
    part_done(call, part);
  }
}
