// What racecheck follows: a warpgroup fills a buffer in shared memory, one thread of another warp reads it, two buffers in turn, as
// the stores of a matrix product do. How the buffer is handed over is an argument: 0 one lane arrives for its warp, after
// __syncwarp; 1 every lane arrives; 2 nobody waits, which is a race.
//
//   nvcc -arch=sm_90a -o turns turns.cu && for how in 0 1 2; do compute-sanitizer --tool racecheck ./turns $how; done
//
// Compute Sanitizer of CUDA 13.0 on an H200 reports 1 error, 0 errors and 4 errors; the sums are right, right and wrong.
#include <cstdint>
#include <cstdio>

__device__ uint32_t address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

__device__ void init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address(barrier)), "r"(parity)
        : "memory");
  }
}

template <int kHow>
__global__ void turns(float* out, int rounds) {
  __shared__ float stage[2][128];
  __shared__ uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      init(&full[i], kHow == 1 ? 128 : 4);
      init(&empty[i], 1);
    }
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    for (int n = 0; n < rounds; ++n) {
      const int b = n % 2;
      if (kHow != 2) wait(&empty[b], ((n / 2) & 1) ^ 1);
      stage[b][threadIdx.x] = float(n + threadIdx.x);
      if (kHow == 1) {
        arrive(&full[b]);
      } else {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&full[b]);
      }
    }
  } else if (threadIdx.x == 128) {
    float sum = 0;
    for (int n = 0; n < rounds; ++n) {
      const int b = n % 2;
      if (kHow != 2) wait(&full[b], (n / 2) & 1);
      for (int i = 0; i < 128; ++i) sum += stage[b][i];
      arrive(&empty[b]);
    }
    *out = sum;
  }
}

int main(int argc, char** argv) {
  const int rounds = 64;
  const char how = argc > 1 ? argv[1][0] : '0';
  float* out;
  cudaMalloc(&out, sizeof(float));
  if (how == '0') turns<0><<<1, 160>>>(out, rounds);
  if (how == '1') turns<1><<<1, 160>>>(out, rounds);
  if (how == '2') turns<2><<<1, 160>>>(out, rounds);
  float sum = 0, right = 0;
  cudaMemcpy(&sum, out, sizeof(float), cudaMemcpyDeviceToHost);
  for (int n = 0; n < rounds; ++n) {
    for (int i = 0; i < 128; ++i) right += n + i;
  }
  printf("how %c: the sum is %.0f, %.0f is right; %s\n", how, sum, right, cudaGetErrorString(cudaGetLastError()));
}
