//! What pieces became before: hash tables with the piece itself as key.
//!
//! A piece of up to 15 bytes is a 16-byte key (its bytes, its length on top) in a 32-byte entry, two to a cache line; one
//! of up to 31 bytes has a 64-byte entry. Tokens lie in the entry, or, where they are too many, in a list behind.

use super::bpe::FoldMap;
use super::memory::Table;

/// Longest piece with a short key.
pub const SHORT: usize = 15;
/// Longest piece with a key in a table.
pub const LONG: usize = 31;
/// Longest piece that is remembered: rulers of signs and the like, which come again.
pub const LONGEST: usize = 255;

/// The bytes of a piece of up to 15 bytes, zeros behind, the length on top. Never 0.
pub type Key = u128;

#[derive(Clone, Copy, Default)]
#[repr(C, align(32))]
struct Entry {
    /// 0 for a free one.
    key: Key,
    /// Up to four ids, their number in the first one's top byte; or [`LISTED`] there, start and number in the next two.
    ids: [u32; 4],
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct LongEntry {
    key: [Key; 2],
    /// Up to seven ids behind their number; or [`LISTED`], start, number.
    ids: [u32; 8],
}

/// "The ids are in the list."
const LISTED: u32 = 255;
/// Ids have fewer bits than this.
const COUNT: u32 = 24;

/// What was found: a few ids in place (the first so many), or a longer list.
pub enum Found<'a, const N: usize = 7> {
    Few([u32; N], usize),
    Many(&'a [u32]),
}

/// The caches of one thread.
#[derive(Clone)]
pub struct Cache {
    short: Table<Entry>,
    short_used: usize,
    long: Table<LongEntry>,
    long_used: usize,
    longest: FoldMap<Box<[u8]>, (u32, u32)>,
    list: Vec<u32>,
}

/// 64 MiB of short entries; text without end must not take memory without end.
const MOST_SHORT: usize = 1 << 21;
const MOST_LONG: usize = 1 << 18;
const MOST_LONGEST: usize = 1 << 15;

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

/// The key of a piece of 16 to 31 bytes.
#[inline(always)]
fn long_key(piece: &[u8]) -> [Key; 2] {
    let mut bytes = [0u8; 32];
    bytes[..piece.len()].copy_from_slice(piece);
    bytes[31] = piece.len() as u8;
    let (halves, _) = bytes.as_chunks::<16>();
    [u128::from_le_bytes(halves[0]), u128::from_le_bytes(halves[1])]
}

/// The hash of a key. Its top bits are good, which is all that tables ask for.
#[inline(always)]
fn hash(key: Key) -> u64 {
    let mixed = (key as u64) ^ ((key >> 64) as u64).wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[inline(always)]
fn long_hash(key: &[Key; 2]) -> u64 {
    hash(key[0]) ^ hash(key[1]).rotate_left(23)
}

impl Cache {
    /// With room for about so many short pieces before it grows.
    pub fn new(room: usize) -> Cache {
        let size = (room * 2).next_power_of_two().max(1 << 10);
        let (short, long) = (Table::new(size), Table::new(1 << 12));
        Cache { short, short_used: 0, long, long_used: 0, longest: FoldMap::default(), list: Vec::new() }
    }

    /// The first slot of a short piece, whose cache line is asked for. Until something is put it stays that.
    #[inline(always)]
    pub fn ask(&self, key: Key) -> u32 {
        let slot = self.short.slot(hash(key));
        self.short.prefetch(slot);
        slot as u32
    }

    /// The ids of a short piece by its first slot.
    #[inline(always)]
    pub fn get(&self, key: Key, first: u32) -> Option<Found<'_, 4>> {
        let mut slot = first as usize;
        loop {
            let entry = self.short.at(slot);
            if entry.key == key {
                let count = entry.ids[0] >> COUNT;
                if count <= 4 {
                    let mut ids = entry.ids;
                    ids[0] &= (1 << COUNT) - 1;
                    return Some(Found::Few(ids, count as usize));
                }
                let start = entry.ids[1] as usize;
                return Some(Found::Many(&self.list[start..start + entry.ids[2] as usize]));
            }
            if entry.key == 0 {
                return None;
            }
            slot = self.short.next_near(slot, first as usize);
        }
    }

    /// Remembers the ids of a short piece that is not there yet.
    pub fn put(&mut self, key: Key, ids: &[u32]) {
        if self.short_used * 4 >= self.short.len() * 3 {
            if self.short.len() >= MOST_SHORT {
                return;
            }
            let size = self.short.len() * 2;
            let old = std::mem::replace(&mut self.short, Table::new(size));
            for entry in old.slots().iter().filter(|entry| entry.key != 0) {
                let slot = self.free(hash(entry.key));
                *self.short.at_mut(slot) = *entry;
            }
        }
        let mut held = [0; 4];
        if ids.len() <= 4 {
            held[..ids.len()].copy_from_slice(ids);
            held[0] |= (ids.len() as u32) << COUNT;
        } else {
            held = [LISTED << COUNT, self.list.len() as u32, ids.len() as u32, 0];
            self.list.extend_from_slice(ids);
        }
        let slot = self.free(hash(key));
        *self.short.at_mut(slot) = Entry { key, ids: held };
        self.short_used += 1;
    }

    fn free(&self, hash: u64) -> usize {
        let first = self.short.slot(hash);
        let mut slot = first;
        while self.short.at(slot).key != 0 {
            slot = self.short.next_near(slot, first);
        }
        slot
    }

    /// The ids of a piece of 16 to 31 bytes.
    #[inline(always)]
    pub fn get_long(&self, piece: &[u8]) -> Option<Found<'_>> {
        let key = long_key(piece);
        let mut slot = self.long.slot(long_hash(&key));
        loop {
            let entry = self.long.at(slot);
            if entry.key == key {
                let [count, ids @ ..] = entry.ids;
                if count != LISTED {
                    return Some(Found::Few(ids, count as usize & 7));
                }
                let start = ids[0] as usize;
                return Some(Found::Many(&self.list[start..start + ids[1] as usize]));
            }
            if entry.key == [0, 0] {
                return None;
            }
            slot = self.long.next(slot);
        }
    }

    /// Remembers the ids of a piece of 16 to 31 bytes that is not there yet.
    pub fn put_long(&mut self, piece: &[u8], ids: &[u32]) {
        if self.long_used * 8 >= self.long.len() * 5 {
            if self.long.len() >= MOST_LONG {
                return;
            }
            let size = self.long.len() * 2;
            let old = std::mem::replace(&mut self.long, Table::new(size));
            for entry in old.slots().iter().filter(|entry| entry.key != [0, 0]) {
                let slot = self.free_long(&entry.key);
                *self.long.at_mut(slot) = *entry;
            }
        }
        let mut held = [0; 8];
        if ids.len() <= 7 {
            held[0] = ids.len() as u32;
            held[1..=ids.len()].copy_from_slice(ids);
        } else {
            held[..3].copy_from_slice(&[LISTED, self.list.len() as u32, ids.len() as u32]);
            self.list.extend_from_slice(ids);
        }
        let key = long_key(piece);
        let slot = self.free_long(&key);
        *self.long.at_mut(slot) = LongEntry { key, ids: held };
        self.long_used += 1;
    }

    /// The ids of a piece of any length.
    pub fn find(&self, text: &[u8], start: usize, end: usize) -> Option<Found<'_>> {
        let length = end - start;
        if length <= SHORT {
            let key = key(text, start, length);
            return self.get(key, self.short.slot(hash(key)) as u32).map(|found| match found {
                Found::Few([a, b, c, d], count) => Found::Few([a, b, c, d, 0, 0, 0], count),
                Found::Many(many) => Found::Many(many),
            });
        }
        if length <= LONG {
            return self.get_long(&text[start..end]);
        }
        let (from, count) = *self.longest.get(&text[start..end])?;
        Some(Found::Many(&self.list[from as usize..][..count as usize]))
    }

    /// Remembers the ids of a piece that is not there yet, if it is short enough.
    pub fn keep(&mut self, text: &[u8], start: usize, end: usize, ids: &[u32]) {
        let length = end - start;
        if length <= SHORT {
            let key = key(text, start, length);
            self.put(key, ids);
        } else if length <= LONG {
            self.put_long(&text[start..end], ids);
        } else if length <= LONGEST && self.longest.len() < MOST_LONGEST {
            self.longest.insert(text[start..end].into(), (self.list.len() as u32, ids.len() as u32));
            self.list.extend_from_slice(ids);
        }
    }

    fn free_long(&self, key: &[Key; 2]) -> usize {
        let mut slot = self.long.slot(long_hash(key));
        while self.long.at(slot).key != [0, 0] {
            slot = self.long.next(slot);
        }
        slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(cache: &Cache, piece: &[u8]) -> Option<Vec<u32>> {
        cache.find(piece, 0, piece.len()).map(|found| match found {
            Found::Few(ids, count) => ids[..count].to_vec(),
            Found::Many(ids) => ids.to_vec(),
        })
    }

    #[test]
    fn it_gives_back_what_it_got_also_after_it_grew() {
        let mut cache = Cache::new(16);
        let pieces: Vec<String> = (0..20_000).map(|i: usize| format!("{}{i}", "x".repeat(i % 250))).collect();
        for (index, piece) in pieces.iter().enumerate() {
            assert_eq!(found(&cache, piece.as_bytes()), None);
            let ids: Vec<u32> = (0..index as u32 % 11).map(|i| i + index as u32).collect();
            cache.keep(piece.as_bytes(), 0, piece.len(), &ids);
        }
        for (index, piece) in pieces.iter().enumerate() {
            let ids: Vec<u32> = (0..index as u32 % 11).map(|i| i + index as u32).collect();
            assert_eq!(found(&cache, piece.as_bytes()), Some(ids));
        }
    }

    #[test]
    fn keys_of_a_piece_do_not_depend_on_what_follows_it() {
        assert_eq!(key(b"abcdef", 0, 3), key(b"abc and much more text", 0, 3));
        assert_ne!(key(b"ab\0", 0, 2), key(b"ab\0", 0, 3));
    }
}
