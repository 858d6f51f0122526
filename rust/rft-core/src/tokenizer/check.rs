//! The self-check at load: the fast engine against the library, on text that is hard to cut.

use super::Encoded;
use super::engine::{Engine, Places, Sink};
use super::slow::Slow;

/// Words, signs, spaces, marks, digits and scripts that split patterns and merges stumble over.
const PARTS: &[&str] = &[
    "the",
    "Quick",
    "brown",
    "FOX",
    "don't",
    "I'LL",
    "we'Re",
    "'s",
    "''s",
    "'\u{17f}",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "1",
    "23",
    "4567",
    "\u{bd}",
    "\u{664}",
    "!",
    "?!",
    "...",
    "/",
    "//\n",
    "_x",
    "::",
    "->",
    "(foo",
    " (bar",
    "<|im_end|>",
    "</s>",
    "<s>",
    "e\u{301}",
    "\u{301}",
    "\u{e9}",
    "\u{df}",
    "\u{4e16}\u{754c}",
    "\u{3053}\u{3093}\u{306b}\u{3061}\u{306f}",
    "\u{30fb}",
    "\u{41f}\u{440}\u{438}\u{432}\u{435}\u{442}",
    "\u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940}",
    "\u{645}\u{631}\u{62d}\u{628}\u{627}",
    "\u{e20}\u{e32}\u{e29}\u{e32}",
    "\u{d55c}\u{ad6d}\u{c5b4}",
    "\u{1f600}",
    "\u{2764}\u{fe0f}",
    "\u{1f469}\u{200d}\u{1f680}",
    "\u{200b}",
    "\u{feff}",
    "\u{0}",
    "\u{7f}",
    "\u{2581}",
    "\u{2581}x",
    "=",
    "====",
    "aaaaaaaa",
    "helloWorldFOOBar",
    "XMLHttpRequest2",
    "\u{1c5}a",
    "\u{2160}",
    "\u{1d573}",
    "\u{b7}",
    "\u{10ffff}",
    "{\"a\": [1, 2]}",
    "    return x\n",
    "https://example.com/a?b=c&d=%20",
    "\u{1100}\u{1161}\u{11a8}",
    "\u{212b}",
    "\u{fb01}",
    "A\u{327}\u{30a}",
    "\u{f1}",
    "\u{4}\u{6}",
];

/// How many texts of parts are compared.
const TEXTS: usize = 120;

/// Why the fast engine is not to be used, if it is not.
pub fn check(fast: &Engine, slow: &Slow) -> Result<(), String> {
    let mut scratch = fast.scratch();
    let mut compare = |text: &str| -> Result<(), String> {
        let mut given = Encoded::default();
        let mut sink = Sink { ids: &mut given.ids, places: Places::Spans(&mut given.offsets) };
        fast.encode(text, false, &mut scratch, &mut sink, &mut |_| {});
        let wanted = slow.encode(text).map_err(|e| e.problem)?;
        if given != wanted {
            return Err(format!("the self-check at load found other ids for {text:?}"));
        }
        Ok(())
    };
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut next = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 33) as usize % below
    };
    let mut text = String::new();
    for part in PARTS {
        compare(part)?;
    }
    for _ in 0..TEXTS {
        text.clear();
        for _ in 0..12 {
            text.push_str(PARTS[next(PARTS.len())]);
            if next(3) == 0 {
                text.push(' ');
            }
        }
        compare(&text)?;
    }
    Ok(())
}
