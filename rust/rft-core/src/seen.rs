//! The documents that were kept, to find exact duplicates: about 16 bytes each.

/// Tables; their number divides the work of growing.
const TABLES: usize = 64;

/// A set of 128-bit hashes, held as 96 bits of each: two different documents of a billion are taken for the same with a
/// probability of 10^-11.
pub struct Seen {
    tables: Vec<Table>,
}

struct Table {
    /// All zeros is an empty slot. Open addressing, linear probing.
    slots: Vec<[u32; 3]>,
    filled: usize,
}

impl Default for Seen {
    fn default() -> Self {
        // Sizes that differ, so that the tables do not all grow at the same moment, and are 3/4 full on average.
        Seen { tables: (0..TABLES).map(|index| Table { slots: vec![[0; 3]; 64 + index / 4], filled: 0 }).collect() }
    }
}

impl Seen {
    /// Whether the hash is new; it is in the set afterwards.
    pub fn insert(&mut self, hash: u128) -> bool {
        let table = &mut self.tables[(hash as usize) % TABLES];
        // At most 7/8 full; a quarter more each time.
        if (table.filled + 1) * 8 > table.slots.len() * 7 {
            let larger = vec![[0; 3]; table.slots.len() * 5 / 4];
            for slot in std::mem::replace(&mut table.slots, larger) {
                if slot != [0; 3] {
                    let at = table.place(slot);
                    table.slots[at] = slot;
                }
            }
        }
        let slot = match [(hash >> 32) as u32, (hash >> 64) as u32, (hash >> 96) as u32] {
            [0, 0, 0] => [0, 0, 1],
            slot => slot,
        };
        let at = table.place(slot);
        let is_new = table.slots[at] != slot;
        table.filled += usize::from(is_new);
        table.slots[at] = slot;
        is_new
    }
}

impl Table {
    /// Where the slot is, or where it belongs.
    fn place(&self, slot: [u32; 3]) -> usize {
        let mut at = (slot[0] as usize * self.slots.len()) >> 32;
        while self.slots[at] != slot && self.slots[at] != [0; 3] {
            at = if at + 1 == self.slots.len() { 0 } else { at + 1 };
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use xxhash_rust::xxh3::xxh3_128;

    use super::*;

    #[test]
    fn a_hash_is_new_once_in_16_bytes() {
        let (mut seen, mut wanted) = (Seen::default(), HashSet::new());
        let count = 300_000u32;
        for n in 0..count {
            let hash = xxh3_128(&(n / 3 * 2 % 150_000).to_le_bytes());
            assert_eq!(seen.insert(hash), wanted.insert(hash), "{n}");
        }
        for hash in [0, 1, 1 << 32, 1 << 100] {
            assert!(seen.insert(hash) && !seen.insert(hash));
        }
        let slots: usize = seen.tables.iter().map(|table| table.slots.len()).sum();
        let per_hash = (slots * 12) as f64 / (wanted.len() + 4) as f64;
        assert!(per_hash < 17.2, "{per_hash} bytes a hash");
    }
}
