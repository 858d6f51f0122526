//! 64 bytes of text as bit masks, one bit a byte.

/// What ASCII tells, and which bytes are not ASCII. Bit i is byte i.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Raw {
    /// A to Z and a to z.
    pub letter: u64,
    /// A to Z.
    pub upper: u64,
    /// 0 to 9.
    pub digit: u64,
    /// Tab to carriage return, and space.
    pub space: u64,
    /// Line feed and carriage return.
    pub newline: u64,
    /// Line feed.
    pub feed: u64,
    /// Space.
    pub blank: u64,
    /// '.
    pub apostrophe: u64,
    /// /.
    pub slash: u64,
    /// Controls that are no white space.
    pub control: u64,
    /// From 0x80 on.
    pub high: u64,
    /// 0x80 to 0xbf: bytes inside a character.
    pub inner: u64,
}

impl Raw {
    /// From the letters of either case, the bytes from 0x80 on, and two tests: a value and so many behind it, one value.
    #[inline(always)]
    fn of(letter: u64, high: u64, below: impl Fn(u8, u8) -> u64, equal: impl Fn(u8) -> u64) -> Raw {
        let blank = equal(32);
        let (tabs, feed) = (below(9, 5), equal(10));
        Raw {
            letter,
            upper: below(b'A', 26),
            digit: below(b'0', 10),
            space: blank | tabs,
            newline: feed | equal(13),
            feed,
            blank,
            apostrophe: equal(b'\''),
            slash: equal(b'/'),
            control: (below(0, 32) & !tabs) | equal(127),
            high,
            inner: below(0x80, 0x40),
        }
    }
}

/// A way to make the masks.
pub trait Masks {
    /// The masks of 64 bytes.
    ///
    /// # Safety
    /// The processor has what the implementation names.
    unsafe fn of(bytes: &[u8; 64]) -> Raw;

    /// Writes the places of the bits of a mask, added to a base. What lies behind them in the room is lost.
    ///
    /// # Safety
    /// As [`Masks::of`].
    #[inline(always)]
    unsafe fn list(mut bits: u64, base: u32, room: &mut [u32; 80]) {
        let mut filled = 0;
        while bits != 0 {
            room[filled & 63] = base + bits.trailing_zeros();
            bits &= bits - 1;
            filled += 1;
        }
    }
}

/// For any processor: a table look-up a byte.
pub struct Portable;

const FLAGS: [u16; 256] = {
    let mut flags = [0; 256];
    let mut byte = 0usize;
    while byte < 256 {
        let b = byte as u8;
        flags[byte] = (b.is_ascii_alphabetic() as u16)
            | (b.is_ascii_uppercase() as u16) << 1
            | (b.is_ascii_digit() as u16) << 2
            | ((b == 32 || b >= 9 && b <= 13) as u16) << 3
            | ((b == 10 || b == 13) as u16) << 4
            | ((b == 32) as u16) << 5
            | ((b == b'\'') as u16) << 6
            | ((b == b'/') as u16) << 7
            | ((b < 9 || b > 13 && b < 32 || b == 127) as u16) << 8
            | ((b >= 0x80) as u16) << 9
            | ((b >= 0x80 && b < 0xc0) as u16) << 10
            | ((b == 10) as u16) << 11;
        byte += 1;
    }
    flags
};

impl Masks for Portable {
    unsafe fn of(bytes: &[u8; 64]) -> Raw {
        let mut masks = [0u64; 12];
        for (at, byte) in bytes.iter().enumerate() {
            let flags = FLAGS[usize::from(*byte)];
            for (bit, mask) in masks.iter_mut().enumerate() {
                *mask |= u64::from(flags >> bit & 1) << at;
            }
        }
        let [letter, upper, digit, space, newline, blank, apostrophe, slash, control, high, inner, feed] = masks;
        Raw { letter, upper, digit, space, newline, feed, blank, apostrophe, slash, control, high, inner }
    }
}

/// AVX-512 with byte operations.
#[cfg(target_arch = "x86_64")]
pub struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Masks for Avx512 {
    #[inline(always)]
    unsafe fn of(bytes: &[u8; 64]) -> Raw {
        use std::arch::x86_64::*;
        // SAFETY: the caller has AVX-512F and BW; the load reads the 64 bytes of `bytes`, at any alignment.
        unsafe {
            let v = _mm512_loadu_si512(bytes.as_ptr().cast());
            let set = |byte: u8| _mm512_set1_epi8(byte as i8);
            let within =
                |v: __m512i, start: u8, count: u8| _mm512_cmplt_epu8_mask(_mm512_sub_epi8(v, set(start)), set(count));
            let equal = |byte: u8| _mm512_cmpeq_epi8_mask(v, set(byte));
            let letter = within(_mm512_or_si512(v, set(32)), b'a', 26);
            Raw::of(letter, _mm512_movepi8_mask(v), |start, count| within(v, start, count), equal)
        }
    }

    /// Sixteen at a time and without a branch: how many there are cannot be foretold.
    #[inline(always)]
    unsafe fn list(bits: u64, base: u32, room: &mut [u32; 80]) {
        use std::arch::x86_64::*;
        // SAFETY: the caller has AVX-512F; each store is of 16 places from one that at most 48 bits come before, so at most
        // 64 of the 80 are written.
        unsafe {
            let first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let mut places = _mm512_add_epi32(first, _mm512_set1_epi32(base as i32));
            let mut to = room.as_mut_ptr();
            for part in 0..4 {
                let bits = (bits >> (16 * part)) as u16;
                _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi32(bits, places));
                to = to.add(bits.count_ones() as usize);
                places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
            }
        }
    }
}

/// AVX2.
#[cfg(target_arch = "x86_64")]
pub struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Masks for Avx2 {
    #[inline(always)]
    unsafe fn of(bytes: &[u8; 64]) -> Raw {
        use std::arch::x86_64::*;
        // SAFETY: the caller has AVX2; the two loads read the 64 bytes of `bytes`, at any alignment.
        unsafe {
            let low = _mm256_loadu_si256(bytes.as_ptr().cast());
            let top = _mm256_loadu_si256(bytes.as_ptr().add(32).cast());
            let set = |byte: u8| _mm256_set1_epi8(byte as i8);
            let both = |test: &dyn Fn(__m256i) -> __m256i| {
                let bits = |v: __m256i| u64::from(_mm256_movemask_epi8(test(v)) as u32);
                bits(low) | bits(top) << 32
            };
            // Unsigned v - start < count, by min: there is no unsigned compare.
            let within = |v: __m256i, start: u8, count: u8| {
                let v = _mm256_sub_epi8(v, set(start));
                _mm256_cmpeq_epi8(_mm256_min_epu8(v, set(count - 1)), v)
            };
            let below = |start: u8, count: u8| both(&|v| within(v, start, count));
            let equal = |byte: u8| both(&|v| _mm256_cmpeq_epi8(v, set(byte)));
            let letter = both(&|v| within(_mm256_or_si256(v, set(32)), b'a', 26));
            Raw::of(letter, both(&|v| v), below, equal)
        }
    }
}

/// NEON.
#[cfg(target_arch = "aarch64")]
pub struct Neon;

#[cfg(target_arch = "aarch64")]
impl Masks for Neon {
    #[inline(always)]
    unsafe fn of(bytes: &[u8; 64]) -> Raw {
        use std::arch::aarch64::*;
        // SAFETY: NEON is part of AArch64; the four loads read the 64 bytes of `bytes`, at any alignment, and `BITS` is 16
        // bytes long.
        unsafe {
            static BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
            let parts = [0, 16, 32, 48].map(|at| vld1q_u8(bytes.as_ptr().add(at)));
            let bits = vld1q_u8(BITS.as_ptr());
            // Three pairwise sums bring the 64 flags to 8 bytes, in order.
            let all = |test: &dyn Fn(uint8x16_t) -> uint8x16_t| {
                let [a, b, c, d] = parts.map(|part| vandq_u8(test(part), bits));
                let sum = vpaddq_u8(vpaddq_u8(a, b), vpaddq_u8(c, d));
                vgetq_lane_u64::<0>(vreinterpretq_u64_u8(vpaddq_u8(sum, sum)))
            };
            let within =
                |v: uint8x16_t, start: u8, count: u8| vcltq_u8(vsubq_u8(v, vdupq_n_u8(start)), vdupq_n_u8(count));
            let below = |start: u8, count: u8| all(&|v| within(v, start, count));
            let equal = |byte: u8| all(&|v| vceqq_u8(v, vdupq_n_u8(byte)));
            let letter = all(&|v| within(vorrq_u8(v, vdupq_n_u8(32)), b'a', 26));
            Raw::of(letter, below(0x80, 0x80), below, equal)
        }
    }
}

/// What the processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simd {
    /// Nothing that is used.
    Portable,
    /// AVX2, BMI1, BMI2, LZCNT and POPCNT.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The same and AVX-512F and BW.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Simd {
    /// The best that this processor has.
    pub fn best() -> Simd {
        Simd::all()[0]
    }

    /// All that it has, the best first.
    pub fn all() -> Vec<Simd> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            // All that the functions for AVX2 are compiled with.
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            if avx2 {
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
                    all.push(Simd::Avx512);
                }
                all.push(Simd::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        all.push(Simd::Neon);
        all.push(Simd::Portable);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_gives_the_portable_masks() {
        let mut seed = 9u64;
        for round in 0..if cfg!(miri) { 20 } else { 2000 } {
            let mut bytes = [0u8; 64];
            for (at, byte) in bytes.iter_mut().enumerate() {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                // All values in turn, then chance.
                *byte = if round < 8 { (64 * round + at) as u8 } else { (seed >> 33) as u8 };
            }
            // SAFETY: it needs nothing.
            let wanted = unsafe { Portable::of(&bytes) };
            for simd in Simd::all() {
                let given = match simd {
                    Simd::Portable => wanted,
                    // SAFETY: `all` names only what the processor has.
                    #[cfg(target_arch = "x86_64")]
                    Simd::Avx2 => unsafe { Avx2::of(&bytes) },
                    // SAFETY: the same.
                    #[cfg(target_arch = "x86_64")]
                    Simd::Avx512 => unsafe { Avx512::of(&bytes) },
                    // SAFETY: the same.
                    #[cfg(target_arch = "aarch64")]
                    Simd::Neon => unsafe { Neon::of(&bytes) },
                };
                assert_eq!(given, wanted, "{simd:?} {bytes:?}");
            }
            let (mut given, mut wanted) = ([0; 80], [0; 80]);
            let bits = (seed ^ seed >> 31) & seed.rotate_left(round as u32);
            #[cfg(target_arch = "x86_64")]
            if Simd::all().contains(&Simd::Avx512) {
                // SAFETY: `all` names only what the processor has, and the other way needs nothing.
                unsafe {
                    Avx512::list(bits, 700, &mut given);
                    Portable::list(bits, 700, &mut wanted);
                }
                let count = bits.count_ones() as usize;
                assert_eq!(given[..count], wanted[..count], "{bits:x}");
                assert!(bits == 0 || wanted[0] == 700 + bits.trailing_zeros());
            }
        }
    }
}
