"""The engine with tiers: tokens are the same wherever a prefix comes from."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.engine import CacheTiers, Engine, EngineError, EngineRequest
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.page_transfer import PageTransfer
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from dsv3_jax.pages import PageFormat, PageRecord, PageTiers
from dsv3_jax.server.metrics import Metrics
from sharding import make_layout
from tests.engine.conftest import BUCKETS, MAX_LEN
from tests.pages.conftest import IDENTITY, record_of
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

PAGE_SIZE = 8
NEW = 6
SECONDS = 60

_RANDOM = np.random.default_rng(0)
SHARED = _RANDOM.integers(0, 64, 50).tolist()  # six pages
PROMPTS = [[*SHARED, *_RANDOM.integers(0, 64, n).tolist()] for n in (5, 20, 40)]


def make(model: DeepSeekV3, tiers: CacheTiers | None, **options) -> Engine:
    settings = {"max_running": 4, "buckets": BUCKETS, "background": False, "page_size": PAGE_SIZE}
    return Engine(model, None, MAX_LEN, tiers=tiers, **(settings | options))


def run(engine: Engine, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], list[int]]:
    """Returns the tokens of each prompt, and how many of its tokens were cached."""
    handles: list[EngineRequest] = []
    for prompt in prompts:  # one after the other
        handles.append(engine.submit(prompt, max_new_tokens=NEW, ignore_eos=True))
        while engine.step():
            engine.check_integrity()
    done = [handle.result(SECONDS) for handle in handles]
    assert engine.flush_tiers(SECONDS)
    return [c.tokens for c in done], [c.cached_tokens for c in done]


@pytest.fixture(scope="module")
def expected(alone: Generator) -> list[list[int]]:
    done = alone.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    return [completion.tokens for completion in done]


WHOLE = [(len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in PROMPTS]
"""Tokens that are cached if a prompt has been there before."""


@pytest.mark.slow
def test_with_drafts_from_host_memory_and_from_disk(tiny_mtp, expected, tmp_path):
    tiers = CacheTiers(host_bytes=2**24, disk=tmp_path)
    with make(tiny_mtp, tiers, draft="mtp", draft_depth=2) as engine:
        assert run(engine) == (expected, [0, 48, 48])
        assert engine.stats().loaded_tokens == 0
        engine.clear_prefix_cache(tiers=False)
        assert run(engine) == (expected, WHOLE)
        loaded = sum(WHOLE) // PAGE_SIZE - 12  # two prompts hit the first one's pages
        host, disk = engine.stats().tiers
        assert (host.hit_pages, disk.hit_pages) == (loaded, 0)
        assert disk.stored_pages == host.stored_pages > loaded
        engine.clear_prefix_cache(tiers=False)
        assert engine._transfer is not None
        engine._transfer._tiers.clear_memory()
        assert run(engine) == (expected, WHOLE)
        host, disk = engine.stats().tiers
        assert (host.hit_pages, disk.hit_pages) == (loaded, loaded)
        assert engine.stats().loaded_tokens == 2 * loaded * PAGE_SIZE
        text = Metrics(engine, "tiny", PAGE_SIZE).text().decode()
        for tier in ("host", "disk"):
            line = f'dsv3:tier_hit_pages_total{{model_name="tiny",tier="{tier}"}} {loaded}'
            assert line in text
        # With everything given up, prompts are computed.
        engine.clear_prefix_cache()
        assert run(engine) == (expected, [0, 48, 48])


@pytest.mark.slow
def test_preempted_requests_load_what_the_device_lost(tiny_mtp, alone, tmp_path):
    """Prompts that share nothing need twice the pages that there are, also in host memory, which is
    pinned: what comes back from the disk is in ordinary memory."""
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 64, n).tolist() for n in (40, 33, 25, 37)]
    expected = alone.generate(prompts, max_new_tokens=70, ignore_eos=True)
    page = PageFormat.of(tiny_mtp.cache_spec(mtp=True), PAGE_SIZE)
    tiers = CacheTiers(host_bytes=9 * page.num_bytes, disk=tmp_path, pinned=True)
    with make(tiny_mtp, tiers, cache_tokens=28 * PAGE_SIZE, draft="mtp") as engine:
        handles = [engine.submit(each, max_new_tokens=70, ignore_eos=True) for each in prompts]
        while engine.step():
            engine.check_integrity()
        done = [handle.result(SECONDS) for handle in handles]
        stats = engine.stats()
        text = Metrics(engine, "tiny", PAGE_SIZE).text().decode()
    assert [each.tokens for each in done] == [each.tokens for each in expected]
    assert stats.preemptions > 0
    assert stats.tiers[1].hit_pages > 0, "nothing came from the disk"
    computed_again = stats.prompt_tokens - sum(map(len, prompts))
    assert 0 < computed_again < stats.reloaded_tokens
    assert f'dsv3:reloaded_tokens_total{{model_name="tiny"}} {stats.reloaded_tokens}' in text


@pytest.mark.parametrize("background", [True, False])
def test_pages_of_logits_that_are_not_finite_stay_nowhere(tiny_mtp, alone, tmp_path, background):
    """Neither in the prefix index nor in a tier: the pages of a request that ends with such logits,
    of one that shares them, and of one that is cancelled before any are known. Pages before them
    stay. With other weights in the same engine, the same prompts are right."""
    poison = next(i for i in range(64) if i not in SHARED)
    broken = nnx.clone(tiny_mtp)
    table = broken.embed_tokens.weight
    table.set_value(table.get_value().at[poison].set(np.nan))
    prompts = [
        [poison, *SHARED[1:]],  # from the first chunk on
        [*SHARED[:20], poison, *SHARED[21:]],  # chunks have 16 tokens, so from the second on
        [*SHARED[:-1], poison],  # with the last token
    ]
    tiers = CacheTiers(host_bytes=2**24, disk=tmp_path)
    with make(broken, tiers, background=background) as engine:
        for prompt in prompts:
            handles = engine.submit_all(prompt, n=2, max_new_tokens=NEW)
            while not background and engine.step():
                engine.check_integrity()
            for handle in handles:
                with pytest.raises(NonFiniteLogitsError):
                    handle.result(SECONDS)
        assert engine.flush_tiers(SECONDS)
        lookup, addresses = engine.page_transfer.lookup, engine.page_transfer.addresses
        index = engine._loop._scheduler.shards[0].pages
        stored = [lookup(addresses(prompt)) for prompt in prompts]
        # Whole pages of finite chunks: 16 tokens of the second prompt, 48 of the third.
        assert stored == [len(index.cached_prefix([*p, 0])) for p in prompts] == [0, 2, 6]
        for tier in engine.stats().tiers:
            assert tier.stored_pages == 6
        engine.use(tiny_mtp, keep_prefix_cache=True)
        wanted = alone.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        for prompt, want, count in zip(prompts, wanted, stored, strict=True):
            handle = engine.submit(prompt, max_new_tokens=NEW, ignore_eos=True)
            while not background and engine.step():
                engine.check_integrity()
            assert handle.result(SECONDS).tokens == want.tokens
            assert handle.result(SECONDS).cached_tokens == count * PAGE_SIZE


@pytest.mark.parametrize("overlap", [True, False])
def test_a_flush_waits_for_pages_that_no_step_has_launched(tiny_mtp, monkeypatch, overlap):
    """The result of a request can be there before its last pages' copies are launched."""
    save = PageTransfer.save

    def late(self, *args):
        time.sleep(0.2)
        save(self, *args)

    monkeypatch.setattr(PageTransfer, "save", late)
    tiers = CacheTiers(host_bytes=2**24)
    with make(tiny_mtp, tiers, background=True, overlap=overlap) as engine:
        for prompt in PROMPTS:
            tokens = engine.submit(prompt, max_new_tokens=NEW, ignore_eos=True).result(SECONDS)
            assert engine.flush_tiers(SECONDS)
            addresses = engine.page_transfer.addresses(prompt + tokens.tokens[:-1])
            assert engine.page_transfer.lookup(addresses) == len(addresses) > 5
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._loop._executor, "save", lambda saves: Future())
            assert not engine.flush_tiers(0.01)
    with pytest.raises(EngineError, match="shutdown"):
        engine.flush_tiers()
    assert engine.page_transfer.flush(5), "its thread has ended, and nobody would answer"


@pytest.mark.slow
def test_another_model_loads_no_page_and_a_restart_keeps_the_disk(tiny_mtp, expected, tmp_path):
    tiers = CacheTiers(host_bytes=2**24, disk=tmp_path / "pages")
    with make(tiny_mtp, tiers) as engine:
        run(engine)
        other = dsv3_jax.load(_checkpoint(tmp_path / "other", seed=1))[0]
        engine.use(other)
        changed, cached = run(engine)
        assert changed != expected
        assert cached == [0, 48, 48]
        engine.use(tiny_mtp)  # whose pages are still there
        assert run(engine) == (expected, WHOLE)
    with make(other, tiers) as engine:
        assert run(engine) == (changed, WHOLE)
        host, disk = engine.stats().tiers
        assert (host.hit_pages, disk.hit_pages) == (0, sum(WHOLE) // PAGE_SIZE - 12)


def test_waiting_requests_load_within_the_memory_for_it(tiny_mtp, alone, tmp_path, monkeypatch):
    """Whatever host memory and staging memory there is: none of both, here."""
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 64, 6 * PAGE_SIZE + 3).tolist() for _ in range(12)]
    expected = alone.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    page = PageFormat.of(tiny_mtp.cache_spec(mtp=True), PAGE_SIZE).num_bytes
    tiers = CacheTiers(disk=tmp_path, staging_bytes=0, load_bytes=14 * page)
    alive: list[weakref.ref[np.ndarray]] = []
    seen: list[int] = []
    read = PageRecord.read

    def counted(file, size):
        record = read(file, size)
        alive.append(weakref.ref(record.payload))
        seen.append(sum(array.nbytes for ref in list(alive) if (array := ref()) is not None))
        return record

    monkeypatch.setattr(PageRecord, "read", counted)
    with make(tiny_mtp, tiers, draft="mtp") as engine:
        assert run(engine, prompts)[1] == [0] * 12
        engine.clear_prefix_cache(tiers=False)
        handles = [engine.submit(each, max_new_tokens=NEW, ignore_eos=True) for each in prompts]
        while engine.step():
            engine.check_integrity()
            assert engine.stats().loading_bytes <= tiers.load_bytes
        done = [handle.result(SECONDS) for handle in handles]
        assert [each.tokens for each in done] == [each.tokens for each in expected]
        assert [each.cached_tokens for each in done] == [6 * PAGE_SIZE] * 12
        assert engine.stats().loading_bytes == 0
        text = Metrics(engine, "tiny", PAGE_SIZE).text().decode()
        assert 'dsv3:prefix_load_bytes{model_name="tiny"} 0.0' in text
    assert len(seen) == 72
    assert 6 * page < max(seen) <= tiers.load_bytes


class TestTransfer:
    """Loads of a transfer without a device."""

    @pytest.fixture
    def transfer(self):
        self.packer = SimpleNamespace(pinned=False, stage=lambda payload, pinned: ())
        config = CacheTiers(host_bytes=2**20)
        tiers = PageTiers(config)
        pool = SimpleNamespace(token_parts=1)
        transfer = PageTransfer(IDENTITY, tiers, self.packer, pool, config)
        transfer.on_load = (loaded := threading.Event()).set
        self.loaded = loaded
        self.addresses = IDENTITY.addresses(list(range(100, 126)))
        tiers.store([record_of(address) for address in self.addresses])
        yield transfer
        transfer.close(SECONDS)

    @pytest.mark.parametrize("error", [MemoryError, RecursionError, SystemExit, KeyboardInterrupt])
    def test_any_error_ends_the_load(self, transfer, error):
        def fail(payload, pinned):
            raise error

        self.packer.stage = fail
        load = transfer.load(self.addresses)
        assert self.loaded.wait(SECONDS)
        assert load.contents == []

    @pytest.mark.parametrize("error", [MemoryError(), SystemExit(), OSError()])
    def test_a_future_with_an_error_ends_the_load(self, transfer, error, monkeypatch):
        future: Future[list[PageRecord]] = Future()
        future.set_exception(error)
        monkeypatch.setattr(transfer._tiers, "fetch", lambda addresses: future)
        load = transfer.load(self.addresses)
        assert self.loaded.wait(SECONDS)
        assert load.contents == []

    def test_a_load_that_is_given_up_keeps_no_page(self, transfer):
        """Not even while another one is copied to the device before it."""
        began, go = threading.Event(), threading.Event()

        def stage(payload, pinned):
            began.set()
            go.wait(SECONDS)
            return ()

        self.packer.stage = stage
        first = transfer.load(self.addresses[:1])
        assert began.wait(SECONDS)
        second = transfer.load(self.addresses)
        pages = [weakref.ref(record) for record in second.future.result(SECONDS)]
        transfer._tiers.clear_memory()
        second.close()
        assert not any(page() for page in pages[1:])
        go.set()
        assert self.loaded.wait(SECONDS)
        assert len(first.contents) == 1
        first.close()

    def test_pages_that_cannot_be_saved_do_not_end_the_thread(self, transfer, caplog):
        class Page:
            def __iter__(self):
                raise MemoryError

        size = IDENTITY.format.num_bytes
        assert transfer._reserve_unsaved(1, size) == 1
        transfer._queue.put((IDENTITY, self.addresses[:1], [Page()]))
        assert transfer.flush(SECONDS)
        assert transfer.dropped_pages == 1
        assert transfer._unsaved_bytes == 0
        assert "1 pages were not saved: MemoryError()" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "tiers: expected None with deterministic=True"),
        ({"prefix_cache": False}, "tiers: expected None with prefix_cache=False"),
    ],
)
def test_settings_that_contradict_tiers(tiny_mtp, options, message):
    with pytest.raises(ValueError, match=message):
        make(tiny_mtp, CacheTiers(host_bytes=1), **options)


def _checkpoint(directory: Path, *, seed: int = 0, **changes) -> Path:
    config = tiny_config(num_hidden_layers=2, **changes)
    write_checkpoint(directory, config, random_tensors(config, seed=seed))
    return directory


@pytest.mark.slow
class TestUnderLoad:
    """A cache that is too small for what runs, threads, and every tier."""

    COUNT = 60

    def test_tokens_are_those_of_a_lone_request(self, tiny_mtp, alone, tmp_path):
        random = np.random.default_rng(1)
        prompts = [
            [*PROMPTS[i % 3][: int(random.integers(20, 80))], *random.integers(0, 64, 3).tolist()]
            for i in range(self.COUNT)
        ]
        done = alone.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        # Host memory for nine pages, so that the disk is read as well.
        page = PageFormat.of(tiny_mtp.cache_spec(mtp=True), PAGE_SIZE)
        tiers = CacheTiers(host_bytes=9 * page.num_bytes, disk=tmp_path)
        options = {"draft": "mtp", "cache_tokens": 2 * MAX_LEN, "background": True}
        with make(tiny_mtp, tiers, **options) as engine:
            for begin in range(0, self.COUNT, 12):
                handles = [
                    engine.submit(prompt, max_new_tokens=NEW, ignore_eos=True)
                    for prompt in prompts[begin : begin + 12]
                ]
                handles[3].cancel()
                for handle, reference in zip(handles, done[begin : begin + 12], strict=True):
                    tokens = handle.result(SECONDS).tokens
                    assert tokens == reference.tokens[: len(tokens)]
                engine.check_integrity()
                engine.clear_prefix_cache(tiers=False)
            stats = engine.stats()
        assert stats.loaded_tokens > 0
        assert all(tier.hit_pages > 0 and tier.damaged_pages == 0 for tier in stats.tiers)


@pytest.mark.slow
def test_across_layouts(tmp_path):
    """Devices that share a sequence's tokens write pages for one device, and one device writes
    pages for data-parallel attention with experts on all devices and drafts."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    directory = _checkpoint(tmp_path / "model", **heads)
    tiers = CacheTiers(host_bytes=2**24, disk=tmp_path / "pages")
    tokens: list[list[int]] = []
    for draft, names in ((None, ["context_parallel", None]), ("mtp", [None, "dp_attention_ep"])):
        for number, name in enumerate(names):
            layout = None if name is None else make_layout(name)
            shards = 1 if layout is None else layout.num_shards("batch")
            options = {
                "draft": draft,
                "max_running": 2 * shards,
                "cache_tokens": 2 * MAX_LEN * 8,
                "buckets": Buckets((2,), (2,), 16, 3),
                "page_size": 4,
            }
            engine = make(dsv3_jax.load(directory, layout=layout)[0], tiers, **options)
            got, cached = run(engine)
            tokens = tokens or got
            assert got == tokens, name
            if number:
                # A page of 8 devices that share a sequence has 32 tokens.
                whole = [(len(p) - 1) // 4 * 4 for p in PROMPTS]
                full = [(len(p) - 1) // 32 * 32 for p in PROMPTS]
                assert all(f <= c <= w for f, c, w in zip(full, cached, whole, strict=True))
                assert engine.stats().tiers[1].hit_pages > 0
                engine.clear_prefix_cache(tiers=False)
                assert run(engine) == (tokens, whole)
                assert engine.stats().tiers[0].hit_pages > 0
            engine.shutdown()
