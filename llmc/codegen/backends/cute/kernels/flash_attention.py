"""FlashAttention 4 on Hopper over small pages: what llmc changes in the published kernel, in CuTe.

`compile_worker.py` executes this text after the constants of a node (see `flash_attention.py` in the parent package).
It changes what the kernel of the package flash-attn-4 reads, not what it computes:

- Row i of a batch has the tokens starts[i] .. starts[i+1] and the device row rows[i]; its keys end at the position of
  its last token. The kernel receives `rows` as its used numbers of queries, and `positions` as those of keys.
- A tile of TILE_N keys is copied page by page. Pages after the last key are not read; they count as zeros.
- The kernel waits for the previous launch, and then allows the next one to begin.
"""

from dataclasses import replace
from types import MappingProxyType

import cutlass
import cutlass.cute as cute
import flash_attn.cute.flash_fwd_sm90 as published
from cutlass import Boolean, Float32, Int32
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.tile_scheduler import SingleTileVarlenScheduler, WorkTileInfo
from flash_attn.cute.utils import create_softcap_scoremod

ELEMENT = MappingProxyType({"bf16": cutlass.BFloat16, "f16": cutlass.Float16, "f32": cutlass.Float32})
PAGES = TILE_N // PAGE  # pages of a tile of keys
GROUP = HEADS // KV_HEADS if PACKED else 1  # query heads of a tile
ABSENT = -1  # a page number that no pool has; the copy of such a page consists of zeros
ALIGN = 16  # bytes, of every pointer


@cute.jit
def keys_of(rows: cute.Tensor, positions: cute.Tensor, row: Int32, first: Int32, length: Int32) -> Int32:
    """Return the number of keys of row `row` of the batch; 0 for padding and for rows of fewer than MIN_TOKENS."""
    keys = Int32(0)
    if rows[row] >= 0 and length >= MIN_TOKENS:
        position = positions[first]
        if position >= 0:
            keys = position + length
    return keys


class Rows:
    """Makes the lengths of a row; takes the place of `SeqlenInfoQK`."""

    @staticmethod
    def create(row, mCuSeqlensQ, mSeqUsedQ, mSeqUsedK, **other):
        made = SeqlenInfoQK.create(row, mCuSeqlensQ=mCuSeqlensQ, **other)
        keys = keys_of(mSeqUsedQ, mSeqUsedK, row, made.offset_q, made.seqlen_q)
        return replace(made, seqlen_k=keys)


class FirstTiles:
    """The number of the first tile of each row, and of the end, as a table that is computed when it is read.

    Row i has as many tiles as fit into its queries, rounded up, or one more, which is then empty: its first tile is
    known from starts[i] alone, without the lengths of the rows before.
    """

    def __init__(self, starts):
        self.starts = starts

    def __getitem__(self, row):
        return self.starts[row] * GROUP // TILE_M + row


class RowOfTile:
    """The row of each tile, or the number of rows if the tile is after the last one. The table is searched."""

    def __init__(self, first_tiles, count):
        self.first_tiles, self.count = first_tiles, count

    @cute.jit
    def __getitem__(self, tile):
        """Search with one warp: each round divides the rows into 32 parts and keeps the last that begins by `tile`."""
        low, part = Int32(0), self.count + 1
        while part > 1:
            part = cute.ceil_div(part, cute.arch.WARP_SIZE)
            row = low + cute.arch.lane_idx() * part
            begins = row <= self.count
            if begins:
                begins = self.first_tiles[row] <= tile
            low += (cute.arch.popc(cute.arch.vote_ballot_sync(begins)) - 1) * part
        return low


class Scheduler(SingleTileVarlenScheduler):
    """Finds the row of a block's only tile by a search; waits for the previous launch before it reads the lengths.

    The published scheduler adds up the tiles of all rows, 31 at a time, and does so again after the tile.
    """

    @staticmethod
    def to_underlying_arguments(args, **other):
        return SingleTileVarlenScheduler.to_underlying_arguments(replace(args, mSeqUsedQ=None), **other)

    @staticmethod
    def create(params, ctx=None, *, loc=None, ip=None):
        tile, split, _ = cute.arch.block_idx()
        return Scheduler(params, tile, split, loc=loc, ip=ip)

    def initial_work_tile_info(self, *, loc=None, ip=None):
        if DEPENDENT:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        return self.first_work()

    @cute.jit
    def first_work(self):
        decoder = self.params.decoder
        starts, count = decoder.mCuSeqlensQ, decoder.num_batch
        first_tiles = FirstTiles(starts)
        searched = replace(
            decoder, cu_total_m_blocks_ptr=first_tiles, blocks_to_batch_idx_ptr=RowOfTile(first_tiles, count)
        )
        block, head, row, _, _, _, found = searched.decode(self._tile_idx, Int32(0), Int32(0))
        if found:
            found = block * TILE_M < (starts[row + 1] - starts[row]) * GROUP
        return WorkTileInfo((Int32(block), Int32(head), Int32(row), Int32(0)), found)

    def get_current_work(self, *, loc=None, ip=None):
        nothing = Int32(0)
        return WorkTileInfo((nothing, nothing, nothing, nothing), Boolean(False))


class TilePages:
    """The page numbers of one tile of keys, as a value that loops can carry."""

    def __init__(self, pages):
        self.pages = pages

    def __extract_mlir_values__(self):
        return [value for page in self.pages for value in cutlass.extract_mlir_values(page)]

    def __new_from_mlir_values__(self, values):
        return TilePages([cutlass.new_from_mlir_values(p, [v]) for p, v in zip(self.pages, values, strict=True)])


class PageTable:
    """The pages of the device row of the current tile; takes the place of a table with a line per row of the batch."""

    def __init__(self, table, rows, lengths):
        self.table, self.rows, self.lengths = table, rows, lengths

    def lengths_of(self, row):
        """Return the lengths of a row of the batch, which becomes the current one."""
        made = self.lengths(row)
        self.line, self.keys = cutlass.max(self.rows[row], Int32(0)), made.seqlen_k
        return made

    def __getitem__(self, index):
        _, block = index
        pages = []
        for i in range(PAGES):
            page = block * PAGES + i
            inside = (page >= 0) & (page * PAGE < self.keys)
            read = self.table[self.line, cutlass.min(cutlass.max(page, Int32(0)), self.table.shape[1] - 1)]
            pages.append(cutlass.select_(inside, read, Int32(ABSENT)))
        return TilePages(pages)


def page_atom(op, tensor, layout, tiler, *multicast):
    """Make the bulk copies of keys or values, which are pages, or those of other tensors, which are whole tiles."""
    if multicast:  # the published kernel makes only the copies of keys and values with this argument
        layout = cute.composition(layout, (PAGE, HEAD_DIM))
        tiler = (PAGE, HEAD_DIM)
    return published_cpasync.make_tiled_tma_atom(op, tensor, layout, tiler, *multicast)


def copy_of(atom, coordinate, layout, source, target, **options):
    """Return the function that copies a tile, and the partitioned tensors."""
    if options:  # queries: a tile is one copy
        return published_copies.tma_get_copy_fn(atom, coordinate, layout, source, target, **options)
    page = (PAGE, HEAD_DIM)
    pages, slots = cute.local_tile(source, page, (0, 0, None)), cute.local_tile(target, page, (None, 0, None))
    to, start = published_cpasync.tma_partition(
        atom, coordinate, layout, cute.group_modes(slots, 0, 2), cute.group_modes(pages, 0, 2)
    )

    def copy(src_idx, dst_idx, **barrier):
        for i in range(PAGES):
            cute.copy(atom, start[None, src_idx.pages[i]], to[None, i, dst_idx], **barrier)

    return copy, to, start


class Delegate:
    """A module with some of its attributes replaced."""

    def __init__(self, module, **replaced):
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


published_cpasync, published_copies = published.cpasync, published.copy_utils
published.cpasync = Delegate(published_cpasync, make_tiled_tma_atom=page_atom)
published.copy_utils = Delegate(published_copies, tma_get_copy_fn=copy_of)
published.SeqlenInfoQK, published.SingleTileVarlenScheduler = Rows, Scheduler


def fixed(name, choose):
    """Return a property that stores what `choose` returns for the value that the published kernel sets."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, choose(self, value)))


class PagedAttention(published.FlashAttentionForwardSm90):
    """The published kernel with the changes above. The loading warps need more registers, for the page numbers."""

    num_mma_regs = fixed("_num_mma_regs", lambda self, value: 232 if self.num_wg_mma == 2 else value)
    num_producer_regs = fixed("_num_producer_regs", lambda self, value: 40 if self.num_wg_mma == 2 else value)
    use_tma_O = fixed("_use_tma_O", lambda self, value: False)  # its tensor would begin far before the result

    def load(self, *args):
        args = list(args)
        table, lengths = args[13], args[16]
        pages = PageTable(table, lengths.keywords["mSeqUsedQ"], lengths)
        args[13], args[16] = pages, pages.lengths_of
        return super().load(*args)


def tensor(dtype, shape, stride):
    """Return a tensor without memory, whose sizes of None are known only at a launch."""
    sizes = tuple(cute.sym_int32() if s is None else s for s in shape)
    return cute.runtime.make_fake_tensor(dtype, sizes, stride=stride, assumed_align=ALIGN)


def build(name):
    """Compile the kernel as the function `name`, which ends in _0; return the result of `cute.compile`."""
    PagedAttention.kernel.set_name_prefix(name.removesuffix("_0"), remove_cutlass_symbol=True, keep_mangled_name=False)
    element = ELEMENT[DTYPE]
    queries = tensor(element, (None, HEADS, HEAD_DIM), (HEADS * HEAD_DIM, HEAD_DIM, 1))
    token = PAGE * HEAD_DIM
    pool = tensor(element, (None, PAGE, KV_HEADS, HEAD_DIM), (2 * KV_HEADS * token, HEAD_DIM, token, 1))
    starts, rows, positions = (tensor(Int32, (None,), (1,)) for _ in range(3))
    table = tensor(Int32, (TABLE_ROWS, TABLE_WIDTH), (TABLE_WIDTH, 1))
    kernel = PagedAttention(
        element, HEAD_DIM, HEAD_DIM, HEADS // KV_HEADS, is_causal=not WINDOW, is_local=bool(WINDOW), pack_gqa=PACKED,
        tile_m=TILE_M, tile_n=TILE_N, num_stages=STAGES, num_threads=2 * TILE_M + 128,
        score_mod=create_softcap_scoremod(SOFTCAP) if SOFTCAP else None,
    )  # fmt: skip
    return cute.compile[cute.KeepCUBIN](
        kernel, queries, pool, pool, queries, None, Float32(SCALE), mCuSeqlensQ=starts, mSeqUsedQ=rows,
        mSeqUsedK=positions, mPageTable=table, window_size_left=Int32(WINDOW - 1) if WINDOW else None,
        window_size_right=Int32(0) if WINDOW else None,
        learnable_sink=tensor(ELEMENT[SINKS], (HEADS,), (1,)) if SINKS else None,
        stream=cute.runtime.make_fake_stream(),
    )  # fmt: skip
