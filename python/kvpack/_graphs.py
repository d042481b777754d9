"""Decoding steps of models of transformers in CUDA graphs: see ``kvpack.hf.use_graphs``."""

import contextlib
import copy
import functools
import sys
import types
import weakref

import torch

from ._kvpack import Error

CACHES = ("past_key_values", "cache")  # versions of transformers differ
_ROTATION = "apply_rotary_pos_emb"  # of the file of a model
_COPIED = ("input_ids", "inputs_embeds", "position_ids", "cache_position")
_MOST_GRAPHS = 8  # of a cache: those of sizes that it has outgrown do not come back


class Graphs:
    """The forward pass of a decoder, replayed from graphs where a batch decodes one token each.

    A graph belongs to a cache and to a number of steps (``kvpack.Step.graph``). The first step of a number runs without
    a graph, so that libraries allocate what they need; the second is captured. Both use what is compiled, if anything
    is.
    """

    def __init__(self, decoder, compiled=None):
        self.decoder = decoder
        self.forward = decoder.forward
        self.compiled = compiled
        self.streams = {}
        """The stream that graphs of a device are captured on."""
        self.refused = None
        """Why the model runs without graphs, if it cannot be captured."""

        functools.update_wrapper(self, self.forward)  # for those who look at its arguments
        decoder.forward = self

    def __deepcopy__(self, memo):
        """Those of a copy of the model, which run its own layers."""
        new = memo[id(self)] = copy.copy(self)
        new.decoder, new.forward, new.compiled = (copy.deepcopy(of, memo)
                                                  for of in (self.decoder, self.forward, self.compiled))
        new.streams = {}
        functools.update_wrapper(new, new.forward)
        return new

    def remove(self):
        del self.decoder.forward

    def __call__(self, *args, **kwargs):
        held, tensors = self.parts(args, kwargs)
        step = None if held is None else self.begin(held, tensors, kwargs)
        kept = None if step is None else self.kept(held, step, tensors, kwargs)
        if kept is None:
            return self.forward(*args, **kwargs) if step is None else self.before_graph(held, args, kwargs)
        try:
            for name, to in kept.inputs.items():
                to.copy_(tensors[name])
            held.open(step)
            kept.graph.replay()
            self.finish(step)
            step.commit()
            held.seen += 1
        finally:
            held.close()
            step.abandon()  # does nothing after the commit
        cache = next(kwargs[name] for name in CACHES if kwargs.get(name) is not None)
        return kept.kind(last_hidden_state=kept.hidden.clone(), **dict.fromkeys(kept.caches, cache))

    def before_graph(self, held, args, kwargs):
        """The step before one that is captured. What it needs is compiled here, which no capture allows."""
        if self.compiled is None or self.refused is not None:
            return self.forward(*args, **kwargs)
        before = held.seen
        try:
            with self.compiled.used():
                return self.forward(*args, **kwargs)
        except Exception as failed:  # of the compiler; a step that is open is rolled back by the next one
            self.refused = f"{type(failed).__name__}: {failed}"
            held.crop(before - held.seen)  # what comes behind the last attention may fail as well
            return self.forward(*args, **kwargs)

    def parts(self, args, kwargs):
        """What holds the cache, and the tensors of the call, if it is one that a graph may replay."""
        cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
        held = getattr(cache, "held", None)
        tensors = {name: kwargs[name] for name in _COPIED if kwargs.get(name) is not None}
        first = tensors.get("input_ids", tensors.get("inputs_embeds"))
        known = {*CACHES, *_COPIED, "attention_mask", "use_cache", "return_dict"}
        others = any(value is not None and value is not False for name, value in kwargs.items() if name not in known)
        if self.refused or args or others or first is None or first.shape[1] != 1 or not self.fits(first):
            return None, {}
        if held is None or held.cache is None or held.batch() != first.shape[0]:
            return None, {}
        if "position_ids" not in tensors:
            tensors["position_ids"] = torch.full((1, 1), held.seen, dtype=torch.long, device=first.device)
        return held, tensors

    def begin(self, held, tensors, kwargs):
        """The step of the call, if a graph may hold it."""
        if not held.is_of(self.plan()):
            return None
        self.own(held)
        held.abandon()
        if held.new_tokens(kwargs.get("attention_mask"), held.batch(), 1) != [1] * held.batch():
            return None
        step = held.cache.begin(held.slots)
        number = self.number(step)
        shapes = tuple((name, tuple(of.shape), of.dtype) for name, of in tensors.items())
        if number is None:
            step.abandon()
            return None
        held.note(number, self.anew(step))
        held.key = (number, shapes)
        return step

    def plan(self):
        """How the layers attend."""
        return next(module._kvpack_plan for module in self.decoder.modules() if hasattr(module, "_kvpack_plan"))

    def own(self, held):
        """Drops the graphs of another model, or of parameters that lie elsewhere now. All of them are looked at once
        for a prompt, and the first with every step."""
        first = next((of.data_ptr() for of in self.decoder.parameters()), None)
        owner = held.owner and held.owner() is self and held.weights[:1] == [first]
        if owner and held.looked:
            return
        weights = [of.data_ptr() for of in self.decoder.parameters()]
        if not owner or weights != held.weights:
            held.drop_graphs()
        held.owner, held.weights, held.looked = weakref.ref(self), weights, True

    def kept(self, held, step, tensors, kwargs):
        """The graph of the step, captured if need be; None where the step runs without."""
        key = held.key
        if key in held.graphs and key[0] not in held.stale:
            kept = held.graphs[key] = held.graphs.pop(key)  # the newest of all
            return kept
        if key not in held.known:
            held.known.add(key)
            step.abandon()
            return None
        with torch.inference_mode(False):  # whose tensors only such a mode may write again
            kept = Kept(step, {name: of.clone() for name, of in tensors.items()})
        given = {**kwargs, **kept.inputs, "attention_mask": None}

        def layers():
            with contextlib.nullcontext() if self.compiled is None else self.compiled.used():
                kept.take(self.forward(**given))

        held.open(step)
        try:
            kept.graph = self.capture(layers, next(iter(kept.inputs.values())).device)
        except Exception as failed:  # of any kernel of the model; it runs without graphs from now on
            self.refused = f"{type(failed).__name__}: {failed}"
            step.abandon()
            return None
        finally:
            held.close()
        for other in [other for other in held.graphs if other[0] == key[0]]:
            del held.graphs[other]  # of memory that is bound no longer
        held.stale.discard(key[0])
        held.graphs[key] = kept
        for oldest in list(held.graphs)[:-_MOST_GRAPHS]:  # a capture has waited for what they did
            del held.graphs[oldest]
            held.known.discard(oldest)
        return kept

    # What a test without a card does otherwise.

    def fits(self, tensor):
        if not tensor.is_cuda or torch.is_grad_enabled():
            return False
        with torch.cuda.device(tensor.device):
            return not torch.cuda.is_current_stream_capturing()

    def number(self, step):
        return step.graph

    def anew(self, step):
        return step.bound_anew

    def capture(self, layers, device):
        """A graph of the layers. PyTorch's own stream for captures is one of the device that captured first."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.streams[device], capture_error_mode="thread_local"):
                layers()
        return graph

    def finish(self, step):
        step.replayed()


class Compiled:
    """The parts of a decoder that a compiler takes: norms, the blocks behind attention, and the function that rotates
    queries and keys. Parts of one class share a function. The model uses them within ``used`` only: prompts, and what
    else runs the model's own code, do not notice.
    """

    def __init__(self, decoder, attention, compiler):
        holds = lambda module: any(part in attention for part in module.modules())
        parts = [part for module in decoder.modules() if holds(module) for part in module.children()
                 if not holds(part) and _is_worth_compiling(part)]
        functions = {kind: compiler(kind.forward) for kind in dict.fromkeys(map(type, parts))}
        homes = dict.fromkeys(sys.modules[type(module).__module__] for module in attention)
        self.replaced = [(part, "forward", functools.partial(functions[type(part)], part)) for part in parts]
        self.replaced += [(home, _ROTATION, compiler(getattr(home, _ROTATION))) for home in homes
                          if hasattr(home, _ROTATION)]

    def __deepcopy__(self, memo):
        """The same functions, for the parts of a copy of the decoder."""
        new = memo[id(self)] = copy.copy(self)
        new.replaced = [(of, name, function) if isinstance(of, types.ModuleType)
                        else (copy.deepcopy(of, memo), name, copy.deepcopy(function, memo))
                        for of, name, function in self.replaced]
        return new

    @contextlib.contextmanager
    def used(self):
        before = [(of, name, vars(of).get(name)) for of, name, _ in self.replaced]
        try:
            for of, name, function in self.replaced:
                setattr(of, name, function)
            yield
        finally:
            for of, name, function in before:
                delattr(of, name) if function is None else setattr(of, name, function)


def _is_worth_compiling(module):
    """Whether a module has more than one kernel. What changed the ``forward`` of a module keeps it."""
    alone = (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList)
    return not isinstance(module, alone) and "forward" not in vars(module) and any(True for _ in module.parameters())


class Kept:
    """A graph, and what it reads and writes: the step keeps the memory of the cache. It does not keep the cache of
    transformers, which keeps the graph: nothing would free either at once."""

    def __init__(self, step, inputs):
        self.step, self.inputs = step, inputs
        self.graph = self.hidden = self.kind = None
        self.caches = []

    def take(self, output):
        """Takes what the decoder returned."""
        found = {name for name, value in output.items() if value is not None}
        others = found - {"last_hidden_state", *CACHES}
        if others:
            raise Error(f"the decoder returns {', '.join(sorted(others))} as well, which no graph keeps")
        self.kind, self.hidden = type(output), output.last_hidden_state
        self.caches = sorted(found & set(CACHES))


def why(graphs):
    """The text for a model that cannot be captured."""
    if graphs is None:
        raise Error("the model uses no graphs; call kvpack.hf.use_graphs(model)")
    return graphs.refused
