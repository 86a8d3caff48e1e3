"""PyTorch's own ring attention."""

from contextlib import contextmanager

from common.exact_attention import head
from common.pytorch import dist, torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def ring_passes(tokens, heads, head_dim, device):
    """PyTorch's ring attention, causal, as `sharded.problem.problem_passes` gives others, behind what they run within. It balances load by pairing
    chunks itself. Its results are in its own order of rows, so that what is compared is the norm of out with that of a reference on the
    gathered rows."""
    # Of newer versions only.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))
    generator = torch.Generator(device=device).manual_seed(5)
    shape = (1, heads, tokens * ranks, head_dim)
    buffers = [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(3)]
    first = [x[0, 0].float() for x in buffers]

    @contextmanager
    def within():
        """Where `scaled_dot_product_attention` is a ring. Rows to shard are wanted each time."""
        rows = torch.zeros((1, 1, tokens * ranks, 1), device=device)
        with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[2], no_restore_buffers={rows}):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                yield

    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, no_restore_buffers=set(buffers)):
        q, k, v = (x.detach().clone().requires_grad_() for x in buffers)

    def attention():
        # By its module, in which some versions put their own.
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with within():
        out = attention()
    dout = torch.randn_like(out)

    def forward():
        with torch.no_grad():
            return attention()

    def backward():
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    rows = torch.arange(tokens * ranks, device=device)
    expected = head(*first, torch.zeros_like(rows), rows + 1).norm()
    square = out[0, 0].detach().float().square().sum()
    dist.all_reduce(square)
    return within, forward, backward, abs(square.sqrt() / expected - 1.0).item() / 1e-2
