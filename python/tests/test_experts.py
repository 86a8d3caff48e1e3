"""Layers of experts: against the dense definition in f64, on ranks in one process and on ranks that are processes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from counterpoint._native import _ask_experts  # noqa: E402
from counterpoint.nn import ExpertLayer  # noqa: E402

POLICIES = ("auto", "sequential", "concurrent", "signals")


@dataclass
class Case:
    """A mixture on some ranks. `ids` are, of each rank, the experts of each token, -1 for none."""

    seed: int
    size: int
    experts: int
    features: tuple[int, int, int]
    ids: list[torch.Tensor]

    @staticmethod
    def drawn(seed: int, size: int) -> Case:
        """Some experts have no rows, some most of them; ranks have different numbers of tokens, some none."""
        draw = random.Random(seed)
        experts, choices = size * draw.randint(1, 4), draw.randint(1, 3)
        popular = list(range(experts)) if draw.random() < 0.4 else draw.sample(range(experts), max(1, experts // 2))
        ids = []
        for _ in range(size):
            tokens = draw.choice([0, 1, 7, 19])
            of_tokens = [draw.sample(popular, min(choices, len(popular))) for _ in range(tokens)]
            filled = [[*ids, *[-1] * (choices - len(ids))] for ids in of_tokens]
            kept = [[-1] * choices if draw.random() < 0.1 else of_token for of_token in filled]
            ids.append(torch.tensor(kept, dtype=torch.int64).view(tokens, choices))
        features = (draw.choice([1, 5, 8]), draw.choice([3, 8, 17]), draw.choice([1, 6, 8]))
        return Case(seed, size, experts, features, ids)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        seed = random.Random(f"{self.seed} {name}").getrandbits(31)
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    @property
    def tokens(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    def routing(self) -> cp.Routing:
        return cp.Routing.top_k(self.experts, self.ids)

    def layers(self, group: Any, **more: Any) -> tuple[ExpertLayer, ExpertLayer]:
        """The two products of each expert, with this rank's part of the weights."""
        up = ExpertLayer("dispatch", *self.features[:2], self.experts, group=group, dtype=torch.float64, **more)
        down = ExpertLayer("combine", *self.features[1:], self.experts, group=group, dtype=torch.float64, **more)
        whole = Dense(self)
        with torch.no_grad():
            up.weight.copy_(self.here(whole.up, group))
            down.weight.copy_(self.here(whole.down, group))
        return up, down

    def here(self, of_experts: torch.Tensor, group: Any) -> torch.Tensor:
        """Of something of all experts, that of those here."""
        return of_experts if isinstance(group, cp.LocalGroup) else of_experts.chunk(self.size)[group.rank]

    def mine(self, of_tokens: torch.Tensor, group: Any) -> torch.Tensor:
        return of_tokens if isinstance(group, cp.LocalGroup) else of_tokens.split(self.tokens)[group.rank]

    def sources(self, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = range(self.size) if isinstance(group, cp.LocalGroup) else [group.rank]
        found = [self.routing().sources(rank) for rank in ranks]
        return tuple(torch.tensor(list(itertools.chain(*parts)), dtype=torch.int64) for parts in zip(*found, strict=True))

    def run(self, group: Any, **more: Any) -> dict[str, torch.Tensor]:
        """A forward and a backward: the results that are here."""
        whole, routing = Dense(self), self.routing()
        up, down = self.layers(group, **more)
        x = self.mine(whole.x, group).clone().requires_grad_()
        gates = whole.gates.clone().requires_grad_()
        tokens, experts = self.sources(group)
        hidden = torch.nn.functional.gelu(up(x, routing)) * gates[tokens, experts].unsqueeze(1)
        y = down(hidden, routing)
        y.backward(self.mine(whole.dy, group))
        assert gates.grad is not None
        found = {"y": y.detach(), "dx": x.grad, "dgates": self.here(gates.grad.T, group)}
        return found | {"dup": up.weight.grad, "ddown": down.weight.grad}

    def expected(self, group: Any) -> dict[str, torch.Tensor]:
        whole = Dense(self).results()
        of_tokens = {name: self.mine(whole[name], group) for name in ("y", "dx")}
        return of_tokens | {name: self.here(whole[name], group) for name in ("dgates", "dup", "ddown")}


class Dense:
    """The definition, token by token."""

    def __init__(self, case: Case) -> None:
        self.case, (enter, middle, leave), tokens = case, case.features, sum(case.tokens)
        self.x, self.dy = case.tensor("x", tokens, enter), case.tensor("dy", tokens, leave)
        self.up, self.down = case.tensor("up", case.experts, middle, enter), case.tensor("down", case.experts, leave, middle)
        self.gates = case.tensor("gates", tokens, case.experts).abs()

    def results(self) -> dict[str, torch.Tensor]:
        x, up, down, gates = leaves = [of.clone().requires_grad_() for of in (self.x, self.up, self.down, self.gates)]
        y = torch.zeros_like(self.dy)
        for token, ids in enumerate(itertools.chain(*(ids.tolist() for ids in self.case.ids))):
            for expert in (id for id in ids if id >= 0):
                hidden = torch.nn.functional.gelu(up[expert] @ x[token])
                y = y.index_add(0, torch.tensor([token]), (gates[token, expert] * (down[expert] @ hidden)).unsqueeze(0))
        if y.requires_grad:
            y.backward(self.dy)
        dx, dup, ddown, dgates = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
        return {"y": y.detach(), "dx": dx, "dup": dup, "ddown": ddown, "dgates": dgates.T}


def check(case: Case, group: Any, **more: Any) -> None:
    found, expected = case.run(group, **more), case.expected(group)
    for name, wanted in expected.items():
        said = f"{name} of {case}, {more}"
        torch.testing.assert_close(found[name], wanted, rtol=1e-11, atol=1e-11, msg=lambda text, said=said: f"{said}: {text}")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_in_a_process_are_what_the_definition_says(size: int) -> None:
    group = cp.LocalGroup(size)
    for seed, overlap in zip(range(24), itertools.cycle(POLICIES), strict=False):
        check(Case.drawn(seed, size), group, overlap=overlap)
    group.close()


def on_pairs(rank: int, seeds: range) -> None:
    """Two groups of two ranks side by side, each with cases of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    group = cp.Group(mesh["ep"])
    for seed, overlap in zip(seeds, itertools.cycle(POLICIES), strict=False):
        check(Case.drawn(2 * seed + rank // 2, 2), group, overlap=overlap)


def test_two_ranks_are_what_the_definition_says(ranks: Ranks) -> None:
    ranks.run(on_pairs, range(100, 124))


def on_all(rank: int) -> None:
    for seed in range(200, 206):
        check(Case.drawn(seed, 4), cp.Group())


def test_four_ranks_are_what_the_definition_says(ranks: Ranks) -> None:
    ranks.run(on_all)


def full(rank: int) -> None:
    """All tokens of all ranks go to one expert; the others have no rows."""
    for expert in range(8):
        ids = [torch.full((tokens, 1), expert) for tokens in (30, 1, 0, 12)]
        check(Case(300 + expert, 4, 8, (8, 16, 8), ids), cp.Group())


def test_one_expert_is_given_everything(ranks: Ranks) -> None:
    ranks.run(full)


def test_policies_change_no_bit() -> None:
    case, group = Case.drawn(5, 2), cp.LocalGroup(2)
    first, *others = [case.run(group, overlap=overlap) for overlap in POLICIES]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_routing_for_each_step() -> None:
    """Forwards of more routings than stay ready, or have backwards made ready ahead; then their backwards, the last first."""
    group, wanted = cp.LocalGroup(2), []
    layer = ExpertLayer("dispatch", 4, 3, 4, group=group, dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    for _ in range(80):
        ids = torch.randint(4, (9, 1), generator=draw)
        x = torch.randn(9, 4, dtype=torch.float64, generator=draw).requires_grad_()
        routing = cp.Routing.top_k(4, ids.split([5, 4]))
        y = layer(x, routing)
        tokens, experts = zip(*(routing.sources(rank) for rank in range(2)), strict=True)
        weights = layer.weight[[*experts[0], *experts[1]]]
        expected = (weights @ x[[*tokens[0], *tokens[1]]].unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        wanted.append((y, expected, x))
    for y, expected, x in reversed(wanted):
        found, reference = (torch.autograd.grad(of.square().sum(), (x, layer.weight)) for of in (y, expected))
        for one, other in zip(found, reference, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def asked(layer: ExpertLayer, routing: cp.Routing, call: str) -> bool:
    """Whether a pass was asked for before; it is from now on."""
    return not _ask_experts(layer.group._native, layer._key(layer._gradient()), routing, call)


def test_passes_are_made_ready_ahead_of_their_calls() -> None:
    """Forwards where they are prefetched, backwards where they will come; results are those of a layer that is called alone."""
    one, other = cp.LocalGroup(2), cp.LocalGroup(2)
    ahead, plain = (ExpertLayer("dispatch", 4, 3, 4, group=group, dtype=torch.float64) for group in (one, other))
    ahead.load_state_dict(plain.state_dict())
    draw = torch.Generator().manual_seed(3)

    def drawn() -> tuple[torch.Tensor, cp.Routing]:
        x = torch.randn(9, 4, dtype=torch.float64, generator=draw).requires_grad_()
        return x, cp.Routing.top_k(4, torch.randint(4, (9, 1), generator=draw).split([5, 4]))

    for is_waited_for in (True, False):
        x, routing = drawn()
        ahead.prefetch(routing)
        if is_waited_for and one._maker is not None:
            one._maker.submit(lambda: None).result()
        assert asked(ahead, routing, "forward") and not asked(plain, routing, "forward")
        made = [layer(x, routing) for layer in (ahead, plain)]
        assert asked(ahead, routing, "backward") and asked(plain, routing, "backward")
        grads = [torch.autograd.grad(y.square().sum(), (x, layer.weight)) for y, layer in zip(made, (ahead, plain), strict=True)]
        assert torch.equal(*made)
        assert all(itertools.starmap(torch.equal, zip(*grads, strict=True)))
    x, routing = drawn()
    with torch.no_grad():
        ahead(x, routing)
    assert not asked(ahead, routing, "backward")
    with pytest.raises(cp.TensorError, match="the layer has 4 on 2"):
        ahead.prefetch(cp.Routing.top_k(4, [torch.zeros(3, 1, dtype=torch.int64)]))
    for group in (one, other):
        group.close()
    with pytest.raises(cp.Error, match="closed"):
        ahead.prefetch(drawn()[1])


def test_passes_are_chosen_for_the_routing_that_was_asked_for_first() -> None:
    """In the caller's order, which is that of all ranks, whichever pass a thread comes to first."""
    few, many = (cp.Routing.top_k(8, [[[at % 8, (at + 3) % 8] for at in range(tokens)]] * 2) for tokens in (4, 4096))
    layers = [cp.nn.ExpertLayer("dispatch", 64, 64, 8, group=cp.LocalGroup(2), dtype=torch.float32) for _ in range(2)]
    of_few = layers[0].passes(few)
    # Asking how binds nothing.
    assert of_few != layers[1].passes(many)
    layers[1].prefetch(few)
    assert layers[1].passes(many) == of_few
    layers[1](torch.zeros(8192, 64), many)
    assert layers[1].passes(many) == of_few


def test_token_counts_that_vary_within_a_capacity() -> None:
    """As without one, bit for bit; and a routing that exceeds it leaves the layer as it was."""
    group, draw = cp.LocalGroup(2), torch.Generator().manual_seed(2)
    plain, within = (
        ExpertLayer("combine", 4, 3, 4, group=group, dtype=torch.float32, **most)
        for most in ({}, {"max_tokens": 8, "max_rows": 20})
    )
    within.load_state_dict(plain.state_dict())
    for tokens in ([3, 1], [8, 7], [0, 2], [8, 8]):
        ids = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(sum(tokens))])
        routing = cp.Routing.top_k(4, ids.split(tokens))
        x = torch.randn(sum(routing.rows), 4, generator=draw).requires_grad_()
        if max(routing.rows) > 20:
            with pytest.raises(cp.TensorError, match="its capacity is 20"):
                within(x, routing)
            continue
        made = [layer(x, routing) for layer in (plain, within)]
        grads = [torch.autograd.grad(y.square().sum(), (x, layer.weight)) for y, layer in zip(made, (plain, within), strict=True)]
        assert torch.equal(*made)
        assert all(itertools.starmap(torch.equal, zip(*grads, strict=True)))


def test_gradients_are_added_to_main_grads_or_left_out() -> None:
    case, group = Case(7, 2, 4, (4, 8, 4), [torch.tensor([[0, 3], [1, -1]]), torch.tensor([[2, 3]])]), cp.LocalGroup(2)
    up, _ = case.layers(group, gradient_accumulation_fusion=True)
    x = Dense(case).x
    up(x, case.routing()).square().sum().backward()
    written = up.weight.grad
    assert written is not None
    up.weight.grad, up.weight.main_grad = None, torch.ones(up.weight.shape, dtype=torch.float64)
    up.weight.grad_added_to_main_grad = False
    up(x, case.routing()).square().sum().backward()
    torch.testing.assert_close(up.weight.main_grad, written + 1, rtol=1e-12, atol=1e-12)
    assert up.weight.grad_added_to_main_grad is True
    up.weight.overwrite_main_grad = True
    up(x, case.routing()).square().sum().backward()
    torch.testing.assert_close(up.weight.main_grad, written, rtol=1e-12, atol=1e-12)
    up.weight.requires_grad_(False)
    x = x.clone().requires_grad_()
    (frozen,) = torch.autograd.grad(up(x, case.routing()).square().sum(), x)
    up.weight.requires_grad_()
    (trained,) = torch.autograd.grad(up(x, case.routing()).square().sum(), x)
    assert torch.equal(frozen, trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    layer = ExpertLayer("combine", 16, 8, 4, group=cp.LocalGroup(2), dtype=dtype)
    routing = cp.Routing.top_k(4, [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[3, 0]])])
    x = torch.randn(6, 16).to(dtype)
    y = layer(x, routing)
    y.sum().backward()
    tokens, experts = (routing.sources(0)[at] + routing.sources(1)[at] for at in range(2))
    rows = (layer.weight.double()[experts] @ x.double().unsqueeze(2)).squeeze(2)
    wanted = torch.zeros(3, 8, dtype=torch.float64).index_add(0, torch.tensor(tokens), rows)
    assert y.dtype == dtype and layer.weight.grad is not None and layer.weight.grad.dtype == dtype
    assert (y.double() - wanted).norm() < 0.01 * wanted.norm()


def test_inputs_that_are_not_dense() -> None:
    case, group = Case(9, 2, 2, (4, 8, 4), [torch.tensor([[0, 1]] * 3), torch.tensor([[1, -1]])]), cp.LocalGroup(2)
    up, _ = case.layers(group)
    x = Dense(case).x
    y = up(x, case.routing())
    assert torch.equal(up(x.T.contiguous().T, case.routing()), y)
    y.sum().backward()  # a gradient that is expanded
    assert up.weight.grad is not None


def test_a_routing_is_a_value() -> None:
    ids = [[[1, 0], [2, -1]], [[2, 1]]]
    routing = cp.Routing.top_k(4, [torch.tensor(of_rank) for of_rank in ids])
    same = cp.Routing.top_k(4, ids)
    assert routing == same and hash(routing) == hash(same) and routing != cp.Routing.top_k(4, [[[0, 1]], [[2, 1]]])
    assert (routing.experts, routing.ranks, routing.tokens, routing.rows) == (4, 2, [2, 1], [3, 2])
    assert routing.rows_of_experts == [1, 2, 2, 0]
    assert routing.sources(0) == ([0, 0, 2], [0, 1, 1]) and routing.sources(1) == ([1, 2], [2, 2])
    assert repr(routing) == "Routing(experts=4, tokens=[2, 1], rows=[3, 2])"
    fewer, dropped = routing.within(1)
    assert (fewer.rows_of_experts, dropped) == ([1, 1, 1, 0], 2)
    counts = cp.Routing.from_counts(2, torch.tensor([[2, 1], [0, 3]]), [3, 3])
    assert counts.sources(1) == ([2, 3, 4, 5], [1, 1, 1, 1])
    assert counts == cp.Routing.top_k(2, [[[0], [0], [1]], [[1]] * 3])
    with pytest.raises(IndexError, match="rank 2 of 2"):
        routing.sources(2)


DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_are_the_same_in_any_form(dtype: torch.dtype) -> None:
    few = 2 if dtype == torch.bool else 100
    ids = [torch.stack([torch.randperm(few)[:2] for _ in range(tokens)]).to(dtype) for tokens in (5, 1)]
    if dtype.is_signed:
        ids[0][1, 0] = -1
    wanted = cp.Routing.top_k(100, [of_rank.tolist() for of_rank in ids])
    arrays = [of_rank.numpy() for of_rank in ids]
    # Not dense, and of other bytes.
    columns = [of_rank.t().contiguous().t() for of_rank in ids]
    swapped = [array.astype(array.dtype.newbyteorder(">")) for array in arrays]
    for given in (
        ids,
        arrays,
        columns,
        swapped,
        [arrays[0], ids[1].tolist()],
        [of_rank.requires_grad_(False) for of_rank in ids],
    ):
        assert cp.Routing.top_k(100, given) == wanted
    alike = cp.Routing.top_k(100, torch.stack([ids[0], ids[0]]))
    assert alike == cp.Routing.top_k(100, [ids[0].tolist()] * 2)
    assert cp.Routing.top_k(4, [ids[1][:0], torch.tensor([[3]])]).tokens == [0, 1]
    for of_one_axis in (ids[0][:, 0], ids[0].unsqueeze(0)):
        with pytest.raises(TypeError, match="must be an array of .tokens, choices. whole numbers"):
            cp.Routing.top_k(100, [of_one_axis, ids[1]])
    with pytest.raises(TypeError, match="whole numbers"):
        cp.Routing.top_k(100, [ids[0].double(), ids[1]])
    with pytest.raises(cp.PlanError, match="other tokens 2"):
        cp.Routing.top_k(100, [ids[0], ids[1][:, :1]])


def test_numbers_that_are_too_large_are_those_of_no_expert() -> None:
    for number in (2**32 - 1, 2**32, 2**63 - 1):
        with pytest.raises(cp.PlanError, match="there are experts 0 to 3"):
            cp.Routing.top_k(4, [torch.tensor([[number]])])


def test_sources_are_tensors_too() -> None:
    case = Case.drawn(5, 2)
    group = cp.LocalGroup(2)
    up, _ = case.layers(group)
    for found, wanted in zip(up.sources(case.routing()), case.sources(group), strict=True):
        assert torch.equal(found, wanted)
    none = up.sources(cp.Routing.top_k(case.experts, [[], []]))
    assert [of.tolist() for of in none] == [[], []]


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (
            lambda: cp.Routing.top_k(4, [[[0, 4]], [[1, 2]]]),
            cp.PlanError,
            "token 0 of rank 0 goes to expert 4; there are experts 0 to 3",
        ),
        (lambda: cp.Routing.top_k(4, [[[0, 0]], [[1, 2]]]), cp.PlanError, "goes to expert 0 twice"),
        (lambda: cp.Routing.top_k(3, [[[0]], [[1]]]), cp.PlanError, "3 experts on 2 ranks"),
        (lambda: cp.Routing.top_k(4, [[[0, 1]], [[2]]]), cp.PlanError, "token 0 of ids[1] has 1 choices, and other tokens 2"),
        (lambda: cp.Routing.top_k(4, [[[2**40]], []]), cp.PlanError, "there are experts 0 to 3"),
        (lambda: cp.Routing.top_k(4, [[0, 1], [2, 3]]), TypeError, "ids[0] must be an array of [tokens, choices] whole numbers"),
        (lambda: cp.Routing.top_k(4, 3), TypeError, "ids must be a list of an array for each rank"),
        (
            lambda: cp.Routing.from_counts(2, [[2, 1], [0, 3]], [3, 4]),
            cp.PlanError,
            "the counts of rank 1 add up to 3 rows, and it has 4",
        ),
        (lambda: cp.Routing.from_counts(2, [[2, 1], [3]], [3, 3]), cp.PlanError, "rank 1 has counts of 1 experts; there are 2"),
        (lambda: cp.Routing.from_counts(2, [[2, -1], [3, 0]], [1, 3]), TypeError, "none negative"),
    ],
)
def test_routings_that_make_no_sense(make: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert said in str(caught.value)


def routed(*, layer: dict[str, Any] | None = None, x: Any = None, routing: Any = None) -> Any:
    """A call of a layer of 4 experts on 2 ranks, with something else in the place of something."""
    made = ExpertLayer(
        **{"kind": "dispatch", "in_features": 4, "out_features": 8, "experts": 4, **(layer or {})}, group=cp.LocalGroup(2)
    )
    return made(torch.zeros(3, 4) if x is None else x, routing or cp.Routing.top_k(4, [[[0]], [[1], [3]]]))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"layer": {"kind": "up"}}, cp.PlanError, 'kind is \'up\'; it must be "dispatch" or "combine"'),
        ({"layer": {"experts": 3}}, cp.PlanError, "experts is 3, which 2 ranks cannot share equally"),
        ({"layer": {"in_features": 0}}, cp.PlanError, "in_features is 0; it must be a whole number of at least 1"),
        ({"layer": {"overlap": "never"}}, ValueError, "never"),
        ({"layer": {"max_tokens": 0}}, cp.PlanError, "max_tokens is 0; it must be a whole number of at least 1, or None"),
        ({"layer": {"max_rows": 2.5}}, cp.PlanError, "max_rows is 2.5; it must be a whole number of at least 1, or None"),
        ({"layer": {"max_tokens": 1}}, cp.TensorError, "rank 1 has 2 tokens, and its capacity is 1"),
        ({"layer": {"max_rows": 1}}, cp.TensorError, "the experts of rank 0 are given 2 rows, and its capacity is 1"),
        ({"layer": {"dtype": torch.float64}}, cp.TensorError, "x is torch.float32 and weight is torch.float64"),
        ({"layer": {"dtype": torch.int32}}, cp.PlanError, "dtype is torch.int32; layers of experts compute in float64"),
        ({"x": torch.zeros(4, 4)}, cp.TensorError, "x is [4, 4]; this routing has 3 tokens here, and the layer 4 features"),
        ({"x": torch.zeros(3, 5)}, cp.TensorError, "x is [3, 5]; this routing has 3 tokens here, and the layer 4 features"),
        ({"x": torch.zeros(3, 4, device="meta")}, cp.TensorError, "x is on meta, and the layer's group computes on cpu"),
        ({"x": [[0.0]]}, cp.TensorError, "x must be a torch.Tensor, not a list"),
        ({"routing": [[0], [1]]}, cp.TensorError, "routing must be a counterpoint.Routing, not a list"),
        (
            {"routing": cp.Routing.top_k(6, [[[0]], [[1], [3]]])},
            cp.TensorError,
            "routing is for 6 experts on 2 ranks; the layer has 4 on 2",
        ),
    ],
)
def test_calls_that_make_no_sense(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        routed(**given)
    assert said in str(caught.value)


def test_a_closed_group_says_so() -> None:
    group = cp.LocalGroup(2)
    layer = ExpertLayer("dispatch", 4, 8, 4, group=group)
    group.close()
    with pytest.raises(cp.Error, match="this group is closed"):
        layer(torch.zeros(2, 4), cp.Routing.top_k(4, [[[0]], [[1]]]))


def differently_routed(rank: int) -> str:
    layer = ExpertLayer("dispatch", 4, 8, 4, group=cp.Group())
    try:
        layer(torch.zeros(1, 4), cp.Routing.top_k(4, [[[rank % 2]]] * 4))
    except cp.Error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_whose_routings_differ_are_refused() -> None:
    with Ranks(4) as own:
        said = own.run(differently_routed)
    assert all("routing" in one or "PeerError" in one for one in said), said
    assert any("MismatchError" in one for one in said), said


def raising(rank: int) -> None:
    """A rank that refuses its own tensors before anything was enqueued can call again."""
    group = cp.Group()
    layer, routing = ExpertLayer("dispatch", 4, 8, 4, group=group), cp.Routing.top_k(4, [[[rank]] for rank in range(4)])
    with pytest.raises(cp.TensorError, match="this routing has 1 tokens here"):
        layer(torch.zeros(2, 4), routing)
    assert layer(torch.zeros(1, 4), routing).shape == (1, 8)
    dist.barrier()


def test_a_refused_call_leaves_the_group_whole(ranks: Ranks) -> None:
    ranks.run(raising)


def test_a_layer_without_ranks_has_all_experts() -> None:
    layer = ExpertLayer("dispatch", 4, 8, 3)
    assert layer.weight.shape == (3, 8, 4) and str(layer) == "ExpertLayer('dispatch', 4, 8, experts=3, ranks=1)"
    assert layer(torch.zeros(2, 4), cp.Routing.top_k(3, [[[0, 1], [2, 0]]])).shape == (4, 8)
