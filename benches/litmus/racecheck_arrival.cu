// Does compute-sanitizer's racecheck follow an mbarrier at which one lane arrives for its warp, after __syncwarp()? Warp 0 writes a
// buffer, warp 1 reads it, and with HOPS=2 warp 2 stands between the read and the next write. Nothing here races: each access is
// ordered before the next by __syncwarp, an arrival (release) and a wait (acquire).
//
//   nvcc -arch=sm_90a -lineinfo -DALL_LANES=0 -DHOPS=1 -o litmus racecheck_arrival.cu
//   compute-sanitizer --tool racecheck ./litmus
//
// ALL_LANES=1 has every lane arrive. docs/testing-on-a-gpu.md says what was found.
#include <cstdint>
#include <cstdio>

#ifndef ALL_LANES
#define ALL_LANES 0
#endif
#ifndef HOPS
#define HOPS 1
#endif

constexpr uint32_t kArrivals = ALL_LANES ? 32 : 1;
constexpr uint32_t kRounds = 8;

__device__ uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

__device__ void initialise(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(kArrivals) : "memory");
}

// Tells that this warp is done with what the barrier guards.
__device__ void tell(uint64_t* barrier) {
  __syncwarp();
  if (ALL_LANES || threadIdx.x % 32 == 0) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
  }
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

__global__ void pass_on(uint32_t* sums) {
  __shared__ __align__(16) uint32_t data[128];
  __shared__ uint64_t full, read, empty;
  if (threadIdx.x == 0) {
    initialise(&full);
    initialise(&read);
    initialise(&empty);
  }
  __syncthreads();
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t address = shared_address(data) + 16 * lane;
  uint32_t sum = 0;
  for (uint32_t round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 32) {
      wait(HOPS == 1 ? &read : &empty, round % 2 ^ 1);
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(round + lane) : "memory");
      tell(&full);
    } else if (threadIdx.x < 64) {
      wait(&full, round % 2);
      uint32_t x, y, z, w;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                   : "r"(address)
                   : "memory");
      sum += x + y + z + w;
      tell(&read);
    } else if (HOPS == 2) {
      wait(&read, round % 2);
      tell(&empty);
    }
  }
  if (threadIdx.x / 32 == 1) sums[lane] = sum;
}

int main() {
  uint32_t* sums = nullptr;
  cudaMalloc(&sums, 32 * sizeof(uint32_t));
  pass_on<<<1, 96>>>(sums);
  uint32_t found[32] = {};
  cudaMemcpy(found, sums, sizeof(found), cudaMemcpyDeviceToHost);
  uint32_t wrong = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) wrong += found[lane] != 4 * (kRounds * (kRounds - 1) / 2 + kRounds * lane);
  std::printf("ALL_LANES=%d HOPS=%d: %s, %u of 32 sums wrong\n", ALL_LANES, HOPS, cudaGetErrorString(cudaGetLastError()), wrong);
  return wrong != 0;
}
