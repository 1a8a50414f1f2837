"""Memory accounting: how many bytes models hold, what a device has, and what to say when it runs out of memory.

Gives `engine/memory.py` its numbers. Layers' specs count what their states take. Weights are counted from the tensors
that a model holds, each storage once, so that it does not matter where they came from.
"""

import functools
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor

from headlong.config import EngineConfig
from headlong.engine.build import Built
from headlong.engine.memory import Costs, Device, MemoryPlan, make_plan, sized
from headlong.env import available_memory
from headlong.errors import ConfigError
from headlong.models.config import ModelConfig
from headlong.models.mtp import MtpHead
from headlong.sampling.table import BYTES_PER_TOKEN
from headlong.state.oom import is_oom
from headlong.state.specs import LayerSpec, bytes_per_page, bytes_per_slot

RESERVE_BYTES = 3 << 28
"""Memory for what does not grow with the model: partial sums (256 MiB at most), CUDA graphs, compiled kernels."""
LOGIT_COPIES = 6
"""How many copies of a step's float32 logits exist: the CUDA graph's, the step's, and those that sampling makes."""
CHUNK_WIDTHS = 48
"""What a token of a prompt's chunk takes at the widest place of a layer, as a number of hidden states in float32."""


def plan_memory(
    config: EngineConfig, built: Built, head: MtpHead | None, drafter: Built | None, max_drafts: int
) -> MemoryPlan:
    """The memory plan of an engine whose models are loaded. `head` is the head that will draft, if any will."""
    specs = built.model.state_specs | (head.state_specs if head is not None else {})
    page, slot = _state_costs(built, specs, config.page_size, max_drafts)
    own_page, own_slot = 0, 0
    if drafter is not None:
        own_page, own_slot = _state_costs(drafter, drafter.model.state_specs, config.page_size, max_drafts)
    reserve, per_row = _reserves(built.model.config, config.resolve_chunk_tokens(), max_drafts)
    seen: dict[Hashable, object] = {}
    costs = Costs(
        target=tensor_bytes(built.model, seen),
        head=tensor_bytes(built.head, seen),
        drafter=tensor_bytes(None if drafter is None else drafter.model, seen),
        page=page + own_page,
        slot=slot + own_slot,
        checkpoint=bytes_per_slot(specs.values(), max_drafts, built.ops.activation_dtype),
        reserve=reserve,
        reserve_per_row=per_row,
    )
    return make_plan(config, built.model.config.max_position, costs, device_memory(built.ops.device))


def tensor_bytes(root: object, seen: dict[Hashable, object] | None = None) -> int:
    """Bytes of all tensors that one of Headlong's objects holds, directly or not. What is in `seen` is not counted
    again; what is counted is added to it."""
    seen = {} if seen is None else seen
    total, todo = 0, [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept, so that no other object gets its id
        if isinstance(thing, Tensor):
            total += _storage_bytes(thing, seen)
        else:
            todo.extend(_parts(thing))
    return total


def device_memory(device: torch.device) -> Device:
    """What a device has, and on a GPU what is free of it."""
    if device.type != "cuda":
        return Device(name=str(device), total=available_memory())
    torch.cuda.empty_cache()  # what loading left behind is free, too
    free, total = torch.cuda.mem_get_info(device)
    return Device(name=str(device), total=total, free=free)


@contextmanager
def refusing_oom(plan: MemoryPlan | None = None) -> Iterator[None]:
    """Turns an out-of-memory error into a ConfigError: about the state, if `plan` says how large it is, else about the
    weights."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_oom(error):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if plan is None:
            raise ConfigError(
                f"the weights do not fit in memory ({first}): use a smaller or narrower model, or another device"
            ) from error
        raise ConfigError(
            f"{sized(plan.kv_bytes)} of pages and {sized(plan.slot_bytes)} of slots could not be had on "
            f"{plan.device} ({first}): use cache_tokens below {plan.num_pages * plan.page_size}, "
            f"max_rows below {plan.num_slots} or a smaller gpu_memory_fraction"
        ) from error


def _state_costs(
    built: Built, specs: Mapping[str, LayerSpec], page_size: int, max_drafts: int
) -> tuple[int, int]:
    """Bytes of one page and of one slot of a model's `State`."""
    layers, ops = specs.values(), built.ops
    carry = built.model.tap_width * ops.activation_dtype.itemsize
    recurrent = bytes_per_slot(layers, max_drafts, ops.activation_dtype)
    return bytes_per_page(layers, page_size, ops.dtype), recurrent + carry + torch.long.itemsize


def _reserves(config: ModelConfig, chunk_tokens: int, max_drafts: int) -> tuple[int, int]:
    """Gives (bytes in any case, bytes for each row), an estimate from the sizes of the largest tensors of a step."""
    chunk = CHUNK_WIDTHS * chunk_tokens * config.hidden_size * torch.float32.itemsize
    logits = LOGIT_COPIES * (1 + max_drafts) * config.vocab_size * torch.float32.itemsize
    return RESERVE_BYTES + chunk, logits + config.vocab_size * BYTES_PER_TOKEN


def _storage_bytes(tensor: Tensor, seen: dict[Hashable, object]) -> int:
    """Bytes of the whole storage that a tensor is a view of; 0 if that was counted before."""
    if tensor.is_mkldnn:
        return tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    key = ("memory", storage.data_ptr())
    if key in seen:
        return 0
    seen[key] = storage
    return storage.nbytes()


def _parts(thing: object) -> list[object]:
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, MethodType):
        return [thing.__self__]
    if type(thing).__module__.partition(".")[0] == "headlong":
        return list(getattr(thing, "__dict__", {}).values())
    return []
