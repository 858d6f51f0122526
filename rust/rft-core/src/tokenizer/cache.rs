//! What pieces became before: hash tables with the piece itself as key, for all threads of a tokenizer.
//!
//! A piece of up to 15 bytes is a 16-byte key (its bytes, its length on top) in a 32-byte entry, two to a cache line; one
//! of up to 31 bytes has a 64-byte entry. Tokens lie in the entry. Those of pieces that are longer, or become more tokens
//! than an entry holds, each thread keeps for itself; the entry says so.
//!
//! Threads share the tables, so that a piece is merged once and not once a thread, and the third-level cache holds one
//! table. They never wait for each other: an entry is claimed, written, and then seen by the last word of its key, behind
//! which it never changes. Two that put the same piece at once leave it there twice, which costs a slot. A table that is
//! full is replaced by a larger one; who still has the old one takes the new one when it finds no room.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::bpe::FoldMap;
use super::memory::{Table, next_near, prefetch};

/// Longest piece with a short key.
pub const SHORT: usize = 15;
/// Longest piece with a key in a table.
pub const LONG: usize = 31;
/// Longest piece that is remembered: rulers of signs and the like, which come again.
pub const LONGEST: usize = 255;

/// The bytes of a piece of up to 15 bytes, zeros behind, the length on top. Never 0.
pub type Key = u128;

/// 64 MiB of short entries; text without end must not take memory without end.
const MOST_SHORT: usize = 1 << 21;
const MOST_LONG: usize = 1 << 18;
/// Pieces that a thread keeps for itself.
const MOST_OWN: usize = 1 << 17;

/// Ids that a short entry holds, and a long one.
pub const FEW: usize = 4;
pub const SOME: usize = 7;
/// Ids have fewer bits than this. The number of ids is in the first one's top byte in a short entry, a word in a long one.
pub const COUNT: u32 = 24;
/// In place of a number: each thread has the ids of its own.
const OWN: u32 = 255;

/// A piece and its ids.
#[repr(C, align(32))]
struct Entry<const K: usize, const N: usize> {
    /// The last word is 0 where the entry is free, [`CLAIMED`] while it is written, and then never changes.
    key: [AtomicU64; K],
    /// Written by who claimed the entry, before it gives the last word; then only read.
    ids: UnsafeCell<[u32; N]>,
}

// SAFETY: ids are written by one thread, which claimed the entry, and read only by those that saw the last word of the
// key that it stored behind them (release and acquire).
unsafe impl<const K: usize, const N: usize> Sync for Entry<K, N> {}

/// No key: its top byte, the length, is 0.
const CLAIMED: u64 = 1;

impl<const K: usize, const N: usize> Default for Entry<K, N> {
    fn default() -> Entry<K, N> {
        Entry { key: [const { AtomicU64::new(0) }; K], ids: UnsafeCell::new([0; N]) }
    }
}

impl<const K: usize, const N: usize> Entry<K, N> {
    /// The ids, where `last` was read of the key.
    #[inline(always)]
    fn ids(&self, last: u64) -> Option<&[u32; N]> {
        // SAFETY: see `Sync` above; a last word that is neither 0 nor CLAIMED was read with acquire by the callers.
        (last > CLAIMED).then(|| unsafe { &*self.ids.get() })
    }
}

/// A table of keys of K words and up to N ids.
struct Pieces<const K: usize, const N: usize> {
    table: Table<Entry<K, N>>,
    used: AtomicUsize,
}

impl<const K: usize, const N: usize> Pieces<K, N> {
    fn new(size: usize) -> Pieces<K, N> {
        Pieces { table: Table::new(size), used: AtomicUsize::new(0) }
    }

    /// The slots, to be looked up in.
    #[inline(always)]
    fn view(&self) -> View<'_, K, N> {
        View { slots: self.table.slots(), shift: self.table.shift() }
    }

    /// Adds a piece; false where there is no room.
    fn put(&self, key: [u64; K], ids: [u32; N]) -> bool {
        // About so many: threads that count at once may count one. A search ends where it began, were all slots taken.
        let used = self.used.load(Ordering::Relaxed);
        if used * 4 >= self.table.len() * 3 {
            return false;
        }
        let view = self.view();
        let first = view.slot(key);
        let mut slot = first;
        loop {
            let entry = &view.slots[slot];
            let last = &entry.key[K - 1];
            if last.load(Ordering::Relaxed) == 0
                && last.compare_exchange(0, CLAIMED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                entry.key[..K - 1].iter().zip(&key).for_each(|(held, word)| held.store(*word, Ordering::Relaxed));
                // SAFETY: the entry was claimed here, so no other thread writes; none reads before the store below.
                unsafe { *entry.ids.get() = ids };
                last.store(key[K - 1], Ordering::Release);
                self.used.store(used + 1, Ordering::Relaxed);
                return true;
            }
            slot = next_near(slot, first, view.slots.len());
            if slot == first {
                return false;
            }
        }
    }

    /// The same pieces in so many slots.
    fn grown(&self, size: usize) -> Pieces<K, N> {
        let larger = Pieces::new(size);
        for entry in self.table.slots() {
            let last = entry.key[K - 1].load(Ordering::Acquire);
            if let Some(ids) = entry.ids(last) {
                let mut key = std::array::from_fn(|word| entry.key[word].load(Ordering::Relaxed));
                key[K - 1] = last;
                larger.put(key, *ids);
            }
        }
        larger
    }
}

/// Where a table's slots lie. What is behind the pointers of [`Cache`] the compiler would read again for each piece: after
/// an acquire, anything may have changed.
#[derive(Clone, Copy)]
pub struct View<'a, const K: usize, const N: usize> {
    slots: &'a [Entry<K, N>],
    shift: u32,
}

impl<'a, const K: usize, const N: usize> View<'a, K, N> {
    /// The first slot of a key.
    #[inline(always)]
    fn slot(&self, key: [u64; K]) -> usize {
        (hash(key) >> self.shift) as usize
    }

    /// The ids of a key, sought from a slot on.
    #[inline(always)]
    fn find(&self, key: [u64; K], first: usize) -> Option<&'a [u32; N]> {
        let mut slot = first;
        loop {
            let entry = &self.slots[slot];
            let last = entry.key[K - 1].load(Ordering::Acquire);
            let mut other = last ^ key[K - 1];
            for (held, word) in entry.key[..K - 1].iter().zip(&key) {
                other |= held.load(Ordering::Relaxed) ^ word;
            }
            if other == 0 {
                return entry.ids(key[K - 1]);
            }
            if last == 0 {
                return None;
            }
            slot = next_near(slot, first, self.slots.len());
            if slot == first {
                return None;
            }
        }
    }
}

/// Slots of short pieces, and of long ones.
pub type Short<'a> = View<'a, 2, FEW>;
pub type Long<'a> = View<'a, 4, { SOME + 1 }>;

impl<'a> Short<'a> {
    /// The first slot of a piece, whose cache line is asked for.
    #[inline(always)]
    pub fn ask(&self, key: Key) -> u32 {
        let slot = self.slot(words(key));
        prefetch(&self.slots[slot]);
        slot as u32
    }

    /// What the first slot of a piece holds, if it is that piece's and holds all of its ids: these, and their number, which
    /// is in the first one from bit [`COUNT`] on.
    #[inline(always)]
    pub fn first(&self, key: Key, first: u32) -> Option<(&'a [u32; FEW], usize)> {
        let entry = self.slots.get(first as usize)?;
        let [first, last] = words(key);
        let held = entry.key[1].load(Ordering::Acquire);
        if (held ^ last) | (entry.key[0].load(Ordering::Relaxed) ^ first) != 0 {
            return None;
        }
        let ids = entry.ids(held)?;
        let count = (ids[0] >> COUNT) as usize;
        (count <= FEW).then_some((ids, count))
    }

    /// The ids of a piece by its first slot, and their number; more than [`FEW`] where the tables do not hold them.
    #[inline(always)]
    pub fn get(&self, key: Key, first: u32) -> Option<([u32; FEW], usize)> {
        let mut ids = *self.find(words(key), first as usize)?;
        let count = ids[0] >> COUNT;
        ids[0] &= (1 << COUNT) - 1;
        Some((ids, count as usize))
    }
}

impl Long<'_> {
    /// Asks for the cache line of a piece of 16 to 31 bytes.
    #[inline(always)]
    pub fn ask(&self, text: &[u8], start: usize, length: usize) {
        prefetch(&self.slots[self.slot(long_key(text, start, length))]);
    }

    /// The ids of a piece of 16 to 31 bytes, and their number; more than [`SOME`] where the tables do not hold them.
    #[inline(always)]
    pub fn get(&self, text: &[u8], start: usize, length: usize) -> Option<([u32; SOME], usize)> {
        let key = long_key(text, start, length);
        let [count, ids @ ..] = *self.find(key, self.slot(key))?;
        Some((ids, count as usize))
    }
}

/// The table of now.
struct Current<const K: usize, const N: usize> {
    pieces: Mutex<Arc<Pieces<K, N>>>,
    most: usize,
}

impl<const K: usize, const N: usize> Current<K, N> {
    fn new(size: usize, most: usize) -> Current<K, N> {
        Current { pieces: Mutex::new(Arc::new(Pieces::new(size))), most }
    }

    fn get(&self) -> Arc<Pieces<K, N>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a piece to a thread's table, which is replaced where it is full and may be larger.
    fn put(&self, own: &mut Arc<Pieces<K, N>>, key: [u64; K], ids: [u32; N]) {
        // Only tried, never waited for: a fork may have left it locked, and a piece is soon merged again.
        if own.put(key, ids) || own.table.len() >= self.most {
            return;
        }
        let Ok(mut current) = self.pieces.try_lock() else { return };
        if Arc::ptr_eq(&current, own) {
            *current = Arc::new(own.grown(own.table.len() * 2));
        }
        *own = current.clone();
        drop(current);
        own.put(key, ids);
    }
}

/// What all threads of a tokenizer know.
pub struct Shared {
    short: Current<2, FEW>,
    long: Current<4, { SOME + 1 }>,
}

impl Shared {
    /// For about so many short pieces: a quarter of the slots at most are taken then. In half as many slots more pieces stand
    /// behind a full pair, in a line that was not asked for, and English took 7 % longer.
    pub fn new(room: usize) -> Shared {
        let size = (room * 4).next_power_of_two().max(1 << 10);
        Shared { short: Current::new(size, MOST_SHORT), long: Current::new(1 << 12, MOST_LONG) }
    }
}

/// A place in a thread's own list: start and number.
pub type Listed = (u32, u32);

/// What was found: a few ids in place (the first so many), or where more are listed.
pub enum Found {
    Few([u32; SOME], usize),
    Many(Listed),
}

/// What one thread knows: what all do, and some of its own.
pub struct Cache {
    short: Arc<Pieces<2, FEW>>,
    long: Arc<Pieces<4, { SOME + 1 }>>,
    own: FoldMap<Box<[u8]>, Listed>,
    list: Vec<u32>,
}

/// Masks for the first n bytes.
static MASKS: [u128; 16] = {
    let mut masks = [0; 16];
    let mut length = 1;
    while length < 16 {
        masks[length] = u128::MAX >> (128 - 8 * length);
        length += 1;
    }
    masks
};

/// The key of a piece of 1 to 15 bytes.
#[inline(always)]
pub fn key(text: &[u8], start: usize, length: usize) -> Key {
    let bytes = match text[start..].first_chunk::<16>() {
        Some(chunk) => u128::from_le_bytes(*chunk),
        None => tail(&text[start..]),
    };
    bytes & MASKS[length & 15] | (length as u128) << 120
}

#[cold]
fn tail(rest: &[u8]) -> u128 {
    let mut chunk = [0; 16];
    let length = rest.len().min(16);
    chunk[..length].copy_from_slice(&rest[..length]);
    u128::from_le_bytes(chunk)
}

#[inline(always)]
fn words(key: Key) -> [u64; 2] {
    [key as u64, (key >> 64) as u64]
}

/// The key of a piece of 16 to 31 bytes.
#[inline(always)]
fn long_key(text: &[u8], start: usize, length: usize) -> [u64; 4] {
    let first = match text[start..].first_chunk::<16>() {
        Some(chunk) => u128::from_le_bytes(*chunk),
        None => tail(&text[start..]),
    };
    let ([a, b], [c, d]) = (words(first), words(key(text, start + 16, length - 16)));
    [a, b, c, d | (length as u64) << 56]
}

/// The hash of a key. Its top bits are good, which is all that tables ask for.
#[inline(always)]
fn hash<const K: usize>(key: [u64; K]) -> u64 {
    let mut all = 0;
    for (turn, two) in (0..).zip(key.chunks_exact(2)) {
        let mixed = two[0] ^ two[1].wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        all ^= mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23 * turn);
    }
    all
}

impl Cache {
    /// Of a thread that works with the others of `shared`.
    pub fn new(shared: &Shared) -> Cache {
        Cache { short: shared.short.get(), long: shared.long.get(), own: FoldMap::default(), list: Vec::new() }
    }

    /// The table of short pieces; until something is kept it stays this one.
    #[inline(always)]
    pub fn short(&self) -> Short<'_> {
        self.short.view()
    }

    /// That of pieces of 16 to 31 bytes.
    #[inline(always)]
    pub fn long(&self) -> Long<'_> {
        self.long.view()
    }

    fn get_short(&self, key: Key) -> Option<([u32; FEW], usize)> {
        let short = self.short();
        short.get(key, short.slot(words(key)) as u32)
    }

    /// Where the ids of a piece are listed that the tables cannot hold.
    pub fn own(&self, piece: &[u8]) -> Option<Listed> {
        self.own.get(piece).copied()
    }

    /// Listed ids.
    pub fn listed(&self, (from, count): Listed) -> &[u32] {
        &self.list[from as usize..][..count as usize]
    }

    /// The ids of a piece of any length.
    pub fn find(&self, text: &[u8], start: usize, end: usize) -> Option<Found> {
        let length = end - start;
        let few = if length <= SHORT {
            self.get_short(key(text, start, length)).map(|([a, b, c, d], count)| ([a, b, c, d, 0, 0, 0], count))
        } else if length <= LONG {
            self.long().get(text, start, length)
        } else {
            None
        };
        match few {
            Some((ids, count)) if count <= SOME => Some(Found::Few(ids, count)),
            None if length <= LONG => None,
            _ => self.own(&text[start..end]).map(Found::Many),
        }
    }

    /// Remembers the ids of a piece that is not there yet, if it is short enough.
    pub fn keep(&mut self, shared: &Shared, text: &[u8], start: usize, end: usize, ids: &[u32]) {
        let (length, piece) = (end - start, &text[start..end]);
        let most = if length <= SHORT { FEW } else { SOME };
        // Another thread may have said already that they are too many.
        let is_marked = ids.len() > most
            && match length {
                ..=SHORT => self.get_short(key(text, start, length)).is_some(),
                _ => length <= LONG && self.long().get(text, start, length).is_some(),
            };
        if length <= LONG && !is_marked {
            let count = if ids.len() <= most { ids.len() as u32 } else { OWN };
            let few = if ids.len() <= most { ids } else { &[] };
            if length <= SHORT {
                let mut held = [0; FEW];
                held[..few.len()].copy_from_slice(few);
                held[0] |= count << COUNT;
                shared.short.put(&mut self.short, words(key(text, start, length)), held);
            } else {
                let mut held = [0; SOME + 1];
                held[0] = count;
                held[1..=few.len()].copy_from_slice(few);
                shared.long.put(&mut self.long, long_key(text, start, length), held);
            }
        }
        if (length > LONG || ids.len() > most) && length <= LONGEST && self.own.len() < MOST_OWN {
            self.own.insert(piece.into(), (self.list.len() as u32, ids.len() as u32));
            self.list.extend_from_slice(ids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(cache: &Cache, piece: &[u8]) -> Option<Vec<u32>> {
        cache.find(piece, 0, piece.len()).map(|found| match found {
            Found::Few(ids, count) => ids[..count].to_vec(),
            Found::Many(listed) => cache.listed(listed).to_vec(),
        })
    }

    fn pieces(count: usize) -> Vec<String> {
        (0..count).map(|i: usize| format!("{}{i}", "x".repeat(i % 250))).collect()
    }

    /// What a piece becomes, here: 0 to 10 ids.
    fn ids_of(index: usize) -> Vec<u32> {
        (0..index as u32 % 11).map(|i| i + index as u32).collect()
    }

    #[test]
    fn it_gives_back_what_it_got_also_after_it_grew() {
        let shared = Shared::new(16);
        let mut cache = Cache::new(&shared);
        let pieces = pieces(20_000);
        for (index, piece) in pieces.iter().enumerate() {
            assert_eq!(found(&cache, piece.as_bytes()), None);
            cache.keep(&shared, piece.as_bytes(), 0, piece.len(), &ids_of(index));
        }
        for (index, piece) in pieces.iter().enumerate() {
            assert_eq!(found(&cache, piece.as_bytes()), Some(ids_of(index)));
        }
        // A thread that comes later knows what the tables hold.
        let other = Cache::new(&shared);
        for (index, piece) in pieces.iter().enumerate() {
            let held = piece.len() <= SHORT && index % 11 <= FEW
                || (SHORT + 1..=LONG).contains(&piece.len()) && index % 11 <= SOME;
            assert_eq!(found(&other, piece.as_bytes()), held.then(|| ids_of(index)));
        }
    }

    #[test]
    fn threads_see_whole_entries_while_others_write_and_tables_grow() {
        // Small under Miri, which looks for races itself.
        let pieces = pieces(if cfg!(miri) { 300 } else { 60_000 });
        let shared = Shared::new(16);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (shared, pieces) = (&shared, &pieces);
                scope.spawn(move || {
                    let mut cache = Cache::new(shared);
                    for turn in 0..pieces.len() * 2 {
                        // Each in an order of its own, so that all meet.
                        let index = (turn * [1, 7, 11, 13][thread] + thread * 17) % pieces.len();
                        let piece = pieces[index].as_bytes();
                        match found(&cache, piece) {
                            Some(ids) => assert_eq!(ids, ids_of(index)),
                            None => cache.keep(shared, piece, 0, piece.len(), &ids_of(index)),
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_search_in_a_table_without_a_free_slot_ends() {
        let pieces = Pieces::<2, FEW>::new(8);
        for index in 1..=8 {
            pieces.used.store(0, Ordering::Relaxed);
            assert!(pieces.put([index, index << 56], [0; FEW]));
        }
        pieces.used.store(0, Ordering::Relaxed);
        assert!(!pieces.put([9, 9 << 56], [0; FEW]));
        let view = pieces.view();
        let found = |index: u64| view.find([index, index << 56], view.slot([index, index << 56])).is_some();
        assert!((1..=8).all(found) && !found(9));
    }

    #[test]
    fn keys_of_a_piece_do_not_depend_on_what_follows_it() {
        assert_eq!(key(b"abcdef", 0, 3), key(b"abc and much more text", 0, 3));
        assert_ne!(key(b"ab\0", 0, 2), key(b"ab\0", 0, 3));
    }
}
