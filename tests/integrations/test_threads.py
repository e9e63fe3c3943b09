"""Four threads train a model of transformers while a fifth compiles others with torch.compile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from aotpack.integrations import transformers as hf
from tests.conftest import build_once
from tests.integrations import models

THREADS, STEPS = 4, 20


def trained(model, start=lambda: None, stop=lambda _: False):
    """Losses of a model's training on batches that are padded in turn; it goes on until ``stop``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start()
    losses = []
    while len(losses) < STEPS or not stop(len(losses)):
        batch = (models.right_padded, models.plain)[len(losses) % 2](len(losses))
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_four_threads_train_while_a_fifth_uses_torch_compile(built):
    (pack,) = hf.register(build_once(built, "transformers", models.package_specs(every=False)))
    replicas = [models.made(models.qwen3(), "aotpack") for _ in range(THREADS + 1)]
    others = [
        torch.nn.Sequential(torch.nn.Linear(8, n), torch.nn.GELU(), torch.nn.Linear(n, 1)) for n in (3, 5, 7)
    ]
    # A process's first compile calls fx.symbolic_trace, which breaks every call of a module in other threads,
    # whatever attention they have (torch 2.11 to 2.14).
    torch.compile(lambda x: 2 * x + 1)(torch.randn(4))
    meeting, compiled = threading.Barrier(THREADS + 1), threading.Event()

    def compiles():
        meeting.wait(60)
        try:
            for other in others:
                torch._dynamo.reset()
                torch.compile(other)(torch.randn(4, 8)).sum().backward()
        finally:
            compiled.set()

    with ThreadPoolExecutor(THREADS + 1) as pool:
        fifth = pool.submit(compiles)
        training = [
            pool.submit(trained, model, lambda: meeting.wait(60), lambda _: compiled.is_set())
            for model in replicas[:THREADS]
        ]
        losses = [each.result(timeout=600) for each in training]
        fifth.result()
    assert all(weight.grad is not None for other in others for weight in other.parameters())
    # The same steps in one thread, with nobody else there.
    alone = trained(replicas[THREADS], stop=lambda done: done >= max(map(len, losses)))
    assert all(found == alone[: len(found)] for found in losses)
    calls = pack.stats().attentions["gemma3_text.causal-padded"].forward
    assert sum(calls.values()) > THREADS * STEPS
