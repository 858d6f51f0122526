//! Pairs of neighbours to the token that they merge to.

use super::memory::Table;
use super::trie::NONE;

/// Inside numbers have 20 bits.
const BITS: u32 = 20;
/// The largest number of tokens. The last number of 20 bits is left free, see [`NOBODY`].
pub const MAX_TOKENS: usize = (1 << BITS) - 1;
/// No token: merges with nothing.
pub const NOBODY: u32 = MAX_TOKENS as u32;

const EMPTY: u64 = u64::MAX;

/// Numbers below it are looked up without a hash. A power of two.
pub const FIRST: u32 = 256;

/// The key of a pair, 40 bits.
#[inline(always)]
pub fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << BITS | u64::from(right)
}

#[inline(always)]
fn product(entry: u64, key: u64) -> u32 {
    if entry >> BITS == key { entry as u32 & NOBODY } else { NONE }
}

/// Pairs while more come: open addressing.
pub struct Growing(Table<u64>);

impl Growing {
    /// With room for so many pairs.
    pub fn new(room: usize) -> Growing {
        Growing(Table::filled((room * 5 / 3).next_power_of_two().max(1024), EMPTY))
    }

    /// Adds a pair that is not there yet.
    pub fn put(&mut self, left: u32, right: u32, product: u32) {
        let key = key(left, right);
        let slot = self.find(key);
        *self.0.at_mut(slot) = key << BITS | u64::from(product);
    }

    /// What a pair merges to, [`NONE`] where it does not.
    #[inline(always)]
    pub fn get(&self, left: u32, right: u32) -> u32 {
        let key = key(left, right);
        product(*self.0.at(self.find(key)), key)
    }

    /// The slot of a key, or the free one where it would be.
    #[inline(always)]
    fn find(&self, key: u64) -> usize {
        let mut slot = self.0.slot(key.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        while *self.0.at(slot) != EMPTY && *self.0.at(slot) >> BITS != key {
            slot = self.0.next(slot);
        }
        slot
    }

    /// The same pairs where no look-up needs a second try.
    pub fn fixed(&self) -> Pairs {
        let entries: Vec<u64> = self.0.slots().iter().copied().filter(|entry| *entry != EMPTY).collect();
        let mut bits = (entries.len() * 5 / 3).next_power_of_two().trailing_zeros().max(10);
        loop {
            // A factor fails where two keys of a group fall on one slot whatever is done to the group.
            for factor in (1..=32u64).map(|index| index.wrapping_mul(0xd6e8_feb8_6659_fd93) | 1) {
                if let Some(pairs) = Pairs::place(&entries, bits, factor) {
                    return pairs;
                }
            }
            bits += 1;
        }
    }
}

/// Pairs that stay as they are: a perfect hash, so that a look-up has no branch. Keys of a group (top bits of one
/// product) share a shift, by which their slots (bits of the same product) are moved to where all of them are free.
pub struct Pairs {
    /// What pairs of numbers below [`FIRST`] merge to: those of most symbols that merging starts from.
    firsts: Vec<u32>,
    slots: Table<u64>,
    shifts: Vec<u16>,
    factor: u64,
    group: u32,
    mask: usize,
}

impl Pairs {
    fn place(entries: &[u64], bits: u32, factor: u64) -> Option<Pairs> {
        // Four to eight pairs a group, largest groups first, while most slots are free.
        let group_bits = bits - 3;
        let mut pairs = Pairs {
            firsts: vec![NONE; (FIRST * FIRST) as usize],
            slots: Table::filled(1 << bits, EMPTY),
            shifts: vec![0; 1 << group_bits],
            factor,
            group: 64 - group_bits,
            mask: (1 << bits) - 1,
        };
        let mut sorted: Vec<(u32, u64)> = entries
            .iter()
            .map(|entry| (((entry >> BITS).wrapping_mul(factor) >> pairs.group) as u32, *entry))
            .collect();
        sorted.sort_unstable();
        let mut groups: Vec<&[(u32, u64)]> = sorted.chunk_by(|a, b| a.0 == b.0).collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
        let mut places: Vec<usize> = Vec::new();
        for group in groups {
            let shift = (0..=u16::MAX).find(|shift| {
                places.clear();
                group.iter().all(|(_, entry)| {
                    let slot = pairs.moved((entry >> BITS).wrapping_mul(factor), *shift);
                    let free = *pairs.slots.at(slot) == EMPTY && !places.contains(&slot);
                    places.push(slot);
                    free
                })
            })?;
            pairs.shifts[group[0].0 as usize] = shift;
            for (slot, (_, entry)) in places.iter().zip(group) {
                *pairs.slots.at_mut(*slot) = *entry;
                let (left, right) = ((entry >> (2 * BITS)) as u32, (entry >> BITS) as u32 & NOBODY);
                if left | right < FIRST {
                    pairs.firsts[(left * FIRST + right) as usize] = *entry as u32 & NOBODY;
                }
            }
        }
        Some(pairs)
    }

    #[inline(always)]
    fn moved(&self, mixed: u64, shift: u16) -> usize {
        ((mixed >> 20) as usize ^ usize::from(shift)) & self.mask
    }

    /// What a pair of numbers below [`FIRST`] merges to, [`NONE`] where it does not.
    #[inline(always)]
    pub fn first(&self, left: u32, right: u32) -> u32 {
        self.firsts[((left % FIRST) * FIRST + right % FIRST) as usize]
    }

    /// The only slot at which a key may be.
    #[inline(always)]
    pub fn slot(&self, key: u64) -> u32 {
        let mixed = key.wrapping_mul(self.factor);
        self.moved(mixed, self.shifts[(mixed >> self.group) as usize]) as u32
    }

    /// Asks for a slot before it is read.
    #[inline(always)]
    pub fn prefetch(&self, slot: u32) {
        self.slots.prefetch(slot as usize);
    }

    /// What the pair with a key merges to, [`NONE`] where it does not.
    #[inline(always)]
    pub fn read(&self, slot: u32, key: u64) -> u32 {
        product(*self.slots.at(slot as usize), key)
    }

    /// What a pair merges to, [`NONE`] where it does not.
    #[inline(always)]
    pub fn get(&self, left: u32, right: u32) -> u32 {
        let key = key(left, right);
        self.read(self.slot(key), key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_pairs_are_those_that_were_put() {
        let mut growing = Growing::new(50_000);
        let pair = |index: u32| (index % 300, index / 300 * 7 + index % 3);
        for index in 0..50_000 {
            let (left, right) = pair(index);
            growing.put(left, right, index);
        }
        let fixed = growing.fixed();
        for index in 0..50_000 {
            let (left, right) = pair(index);
            assert_eq!(fixed.get(left, right), index);
            assert_eq!(growing.get(left, right), index);
            assert!(left | right >= FIRST || fixed.first(left, right) == index);
            assert_eq!(fixed.get(left + 300, right), NONE);
            assert_eq!(growing.get(left + 300, right), NONE);
            assert_eq!(fixed.get(left, NOBODY), NONE);
        }
        assert_eq!(Growing::new(0).fixed().get(0, 0), NONE);
    }
}
