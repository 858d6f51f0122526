//! The epoch's order: a permutation that is a function of its seed alone, the same on every machine.

/// SplitMix64: small, fast, and fixed for ever, because plans depend on it.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for one use (`salt`) of a seed in an epoch.
    pub fn new(seed: u64, epoch: u64, salt: u64) -> Random {
        let mut random = Random(seed);
        for part in [epoch, salt] {
            random.0 = random.next().wrapping_add(part.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        random
    }

    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `n` (n > 0).
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_permutation_that_follows_seed_and_epoch() {
        let order = |seed, epoch| {
            let mut items: Vec<u32> = (0..1000).collect();
            Random::new(seed, epoch, 0).shuffle(&mut items);
            items
        };
        let first = order(1, 0);
        assert_eq!(first, order(1, 0));
        assert_ne!(first, order(1, 1));
        assert_ne!(first, order(2, 0));
        let mut sorted = first;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
    }

    #[test]
    fn the_generator_never_changes() {
        // Plans of sets on disk depend on these numbers.
        let mut random = Random::new(42, 3, 1);
        let drawn: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(drawn, EXPECTED);
    }

    const EXPECTED: [u64; 3] = [15_631_447_266_810_971_941, 6_461_203_535_525_486_704, 12_818_962_036_954_990_668];
}
