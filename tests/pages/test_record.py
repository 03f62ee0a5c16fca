"""Records of pages: what they are addressed by, and what is refused when they arrive."""

import dataclasses
import hashlib
import json
import struct

import pytest

from dsv3_jax.pages import CacheIdentity, PageAddress, PageArray, PageError, PageFormat, PageRecord
from tests.pages.conftest import FORMAT, IDENTITY, arrays_of, record_of

PROMPT = list(range(100, 114))


class TestAddresses:
    def test_only_full_pages_with_their_lookahead_have_one(self):
        assert [len(IDENTITY.addresses(PROMPT[:n])) for n in (4, 5, 8, 9, 14)] == [0, 1, 1, 2, 3]

    def test_they_form_a_chain_from_the_identity(self):
        first, second, _ = IDENTITY.addresses(PROMPT)
        assert first.parent == IDENTITY.digest
        assert second.parent == first.digest
        assert first.tokens == (100, 101, 102, 103, 104)

    def test_they_continue_known_ones(self):
        known = IDENTITY.addresses(PROMPT[:9])
        assert IDENTITY.addresses(PROMPT, known) == IDENTITY.addresses(PROMPT)

    @pytest.mark.parametrize("changed", [0, 4, 5])
    def test_every_token_up_to_the_lookahead_counts(self, changed):
        other = list(PROMPT)
        other[changed] += 1
        mine, others = IDENTITY.addresses(PROMPT), IDENTITY.addresses(other)
        assert [a.digest == b.digest for a, b in zip(mine, others, strict=True)] == [
            changed > 4,
            False,
            False,
        ]

    @pytest.mark.parametrize(
        "change",
        [
            {"model": "another"},
            {"lookahead": 0},
            {"salt": "1"},
            {"format": PageFormat(4, FORMAT.arrays[:2])},
            {"format": dataclasses.replace(FORMAT, page_size=2)},
        ],
    )
    def test_another_identity_has_other_addresses(self, change):
        other = dataclasses.replace(IDENTITY, **change)
        assert not {a.digest for a in other.addresses(PROMPT)} & {
            a.digest for a in IDENTITY.addresses(PROMPT)
        }


class TestEncode:
    def test_it_comes_back_bit_for_bit(self):
        for address in IDENTITY.addresses(PROMPT):
            record = record_of(address)
            again = PageRecord.decode(record.encode())
            again.check(IDENTITY, address)
            assert again.address == address
            assert again.payload.tobytes() == record.payload.tobytes()

    def test_pages_with_rows_of_scales(self):
        """Their rows are part of the format. A record from before, which has scales in an array of
        their own, is another cache's."""
        identity = CacheIdentity(
            "a model", PageFormat(4, (PageArray("layers.0.index_key", 8, "uint8", rows=6),)), 1
        )
        address = identity.addresses(PROMPT)[0]
        record = record_of(address, identity)
        again = PageRecord.decode(record.encode())
        again.check(identity, address)
        ((name, array),) = arrays_of(again.format, again.payload).items()
        assert (name, array.shape) == ("layers.0.index_key", (6, 8))
        assert again.payload.tobytes() == record.payload.tobytes()
        before = PageFormat(
            4,
            (
                PageArray("layers.0.index_scale", 1, "float32"),
                PageArray("layers.0.index_key", 8, "float8_e4m3fn"),
            ),
        )
        old = record_of(address, CacheIdentity("a model", before, 1))
        assert old.num_bytes == record.num_bytes
        with pytest.raises(PageError, match=r"rows=6.*, got .*layers\.0\.index_scale"):
            PageRecord.decode(old.encode()).check(identity, address)

    def test_it_is_made_of_logical_arrays(self):
        record = record_of(IDENTITY.addresses(PROMPT)[0])
        arrays = arrays_of(record.format, record.payload)
        shapes = {name: (x.shape, x.dtype.name) for name, x in arrays.items()}
        assert shapes == {
            "layers.0.scale": ((4, 1), "float32"),
            "layers.0.latent": ((4, 6), "bfloat16"),
            "mtp.0.latent": ((4, 6), "bfloat16"),
        }

    def test_no_bit_can_change(self):
        data = record_of(IDENTITY.addresses(PROMPT)[0]).encode()
        for byte in range(len(data)):
            flipped = bytearray(data)
            flipped[byte] ^= 1 << byte % 8
            with pytest.raises(PageError):
                PageRecord.decode(flipped)

    def test_nothing_can_be_missing(self):
        data = record_of(IDENTITY.addresses(PROMPT)[0]).encode()
        for length in range(0, len(data), 7):
            with pytest.raises(PageError):
                PageRecord.decode(data[:length])
        with pytest.raises(PageError, match="damaged"):
            PageRecord.decode(data + b"\0")


class TestKindsOfDamage:
    """A record with a right checksum can still be another page, or of another program."""

    def damaged(self, **changes) -> bytes:
        data = record_of(IDENTITY.addresses(PROMPT)[1]).encode()
        (length,) = struct.unpack("<Q", data[16:24])
        header = json.loads(data[24 : 24 + length]) | changes
        header = {key: value for key, value in header.items() if value is not None}
        text = json.dumps(header).encode()
        content = data[:16] + struct.pack("<Q", len(text)) + text + data[24 + length : -32]
        return content + hashlib.sha256(content).digest()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"digest": None}, "header is incomplete: 'digest'"),
            ({"tokens": "abc"}, "header is incomplete"),
            ({"format": {"page_size": 4}}, "header is incomplete: 'arrays'"),
            ({"tokens": [1, 2, 3, 4, 5]}, "digest is not that of its tokens"),
            ({"parent": "00" * 32}, "digest is not that of its tokens"),
            ({"mtp": False}, "about the MTP layer"),
            ({"format": {"page_size": 4, "arrays": [["mtp.0.k", 6, "float32"]]}}, "expected 96 b"),
        ],
    )
    def test_a_header_that_does_not_fit(self, changes, message):
        with pytest.raises(PageError, match=message):
            PageRecord.decode(self.damaged(**changes))

    def test_other_data_and_other_versions(self):
        with pytest.raises(PageError, match="begins with"):
            PageRecord.decode(b"x" * 100)
        with pytest.raises(PageError, match=r"expected version b'1\\n', got b'2\\n'"):
            PageRecord.decode(b"dsv3-jax page 2\n" + b"x" * 100)
        with pytest.raises(PageError, match="truncated to 20 bytes"):
            PageRecord.decode(b"dsv3-jax page 1\n" + b"x" * 4)

    def test_another_page(self):
        first, second, _ = IDENTITY.addresses(PROMPT)
        with pytest.raises(PageError, match="expected the tokens"):
            record_of(first).check(IDENTITY, second)
        # The same tokens after other ones.
        moved = PageAddress.of(first.digest, first.tokens)
        with pytest.raises(PageError, match="expected the parent"):
            record_of(first).check(IDENTITY, moved)
        # A collision of digests is noticed by its tokens.
        forged = dataclasses.replace(
            record_of(second), address=dataclasses.replace(second, tokens=(9,) * 5)
        )
        with pytest.raises(PageError, match="expected the tokens"):
            forged.check(IDENTITY, second)

    def test_another_cache(self):
        address = IDENTITY.addresses(PROMPT)[0]
        other_weights = CacheIdentity("other weights", FORMAT, 1)
        with pytest.raises(PageError, match="other weights or other options"):
            record_of(address).check(other_weights, address)
        narrow = PageFormat(4, (PageArray("layers.0.latent", 6, "bfloat16"),))
        with pytest.raises(PageError, match="expected PageFormat"):
            record_of(address).check(CacheIdentity("a model", narrow, 1), address)
