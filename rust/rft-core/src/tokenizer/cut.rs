//! Split patterns by hand: where the piece that starts at a position ends.
//!
//! Each scheme is one known pattern of a tokenizer.json, and cuts exactly as that pattern does in Oniguruma: leftmost
//! match, first alternative that fits, greedy with backtracking. `end` is where the text ends for the pattern.

use super::unicode::{Classes, class, decode};

/// A known split pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// GPT-2's pattern; with `digits`, every numeric character is cut out first (SmolLM, StarCoder, Command R).
    Gpt2 {
        /// Whether a `Digits` pre-tokenizer stands before it.
        digits: bool,
    },
    /// cl100k's pattern and its kin: Qwen, Llama 3, GLM.
    Words {
        /// Whether marks count as letters (Qwen 3.5).
        marks: bool,
        /// How many digits one piece may hold.
        digits: usize,
    },
    /// o200k's pattern and its kin, which cut at changes of case: GPT-OSS, tekken.
    Cased {
        /// Whether a word takes a contraction behind it.
        contractions: bool,
        /// How many digits one piece may hold.
        digits: usize,
    },
    /// DeepSeek V3's three patterns.
    DeepSeek,
    /// Nothing is cut.
    Whole,
    /// Whole runs that start at a space (SentencePiece); with `newlines`, runs of line feeds are pieces (Gemma).
    Spaces {
        /// Whether runs of line feeds are cut out.
        newlines: bool,
    },
}

const SPLIT_GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const CONTRACTION: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const TAIL: &str = r"|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Scheme {
    /// The scheme of one regular expression.
    pub fn of_pattern(pattern: &str) -> Option<Scheme> {
        if pattern == SPLIT_GPT2 {
            return Some(Scheme::Gpt2 { digits: false });
        }
        // The tokenizers of cl100k's kin write the contractions in three ways.
        let pattern = pattern
            .replace(r"'(?i:[sdmt]|ll|ve|re)", CONTRACTION)
            .replace(r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", "(?-u)");
        let pattern = pattern.strip_suffix(TAIL)?;
        for (digits, number) in [(1, r"\p{N}"), (3, r"\p{N}{1,3}")] {
            let words = |letter: &str, other: &str| {
                format!(r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{number}| ?[^\s{other}\p{{N}}]+[\r\n]*")
            };
            if pattern == words(r"\p{L}", r"\p{L}") {
                return Some(Scheme::Words { marks: false, digits });
            }
            if pattern == words(r"[\p{L}\p{M}]", r"\p{L}\p{M}") {
                return Some(Scheme::Words { marks: true, digits });
            }
            for (contractions, suffix) in [(true, format!("{CONTRACTION}?")), (false, String::new())] {
                let (upper, lower) = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
                let prefix = r"[^\r\n\p{L}\p{N}]?";
                let cased = format!(
                    r"{prefix}{upper}*{lower}+{suffix}|{prefix}{upper}+{lower}*{suffix}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
                );
                if pattern == cased {
                    return Some(Scheme::Cased { contractions, digits });
                }
            }
        }
        None
    }

    /// The scheme of a sequence of `Split`s.
    pub fn of_patterns(patterns: &[&str]) -> Option<Scheme> {
        const HAN: &str = "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
        const REST: &str = concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"##,
            "\r\n",
            r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[",
            "\r\n",
            r"]*|\s*[",
            "\r\n",
            r"]+|\s+(?!\S)|\s+"
        );
        match patterns {
            [one] => Scheme::of_pattern(one),
            [number, han, rest] => {
                let rest = rest.replace(r"\r\n", "\r\n");
                (*number == r"\p{N}{1,3}" && *han == HAN && rest == REST).then_some(Scheme::DeepSeek)
            }
            _ => None,
        }
    }
}

/// A scheme with what it needs to cut.
pub struct Cutter {
    /// The scheme.
    pub scheme: Scheme,
    classes: &'static Classes,
    /// [`Scheme::Spaces`]: the bytes behind which a space is not cut off, since a token holds both.
    glue: [bool; 256],
}

impl Cutter {
    /// From its parts.
    pub fn new(scheme: Scheme, classes: &'static Classes, glue: [bool; 256]) -> Cutter {
        Cutter { scheme, classes, glue }
    }

    /// The class of a code point.
    #[inline(always)]
    pub fn class(&self, code: u32) -> u8 {
        self.classes.get(code)
    }

    /// [`Scheme::Spaces`]: whether the space at a position belongs to the piece before it.
    pub fn glues(&self, text: &[u8], at: usize) -> bool {
        text[at] == b' ' && at > 0 && self.glue[usize::from(text[at - 1])]
    }

    /// Where the piece that starts at `from` ends; `end` is where the text ends for the pattern.
    pub fn piece(&self, text: &[u8], from: usize, end: usize) -> usize {
        let at = At { classes: self.classes, text, end };
        match self.scheme {
            Scheme::Whole => end,
            Scheme::Gpt2 { digits } => gpt2(&at, digits, from),
            Scheme::Words { marks, digits } => words(&at, marks, digits, from),
            Scheme::Cased { contractions, digits } => cased(&at, contractions, digits, from),
            Scheme::DeepSeek => deepseek(&at, from),
            Scheme::Spaces { newlines } => spaces(text, newlines, &self.glue, from, end),
        }
    }
}

struct At<'a> {
    classes: &'a Classes,
    text: &'a [u8],
    end: usize,
}

#[derive(Clone, Copy)]
struct Char {
    code: u32,
    class: u8,
    next: usize,
}

impl Char {
    fn is_letter(self) -> bool {
        (class::UPPER..=class::CASELESS).contains(&self.class)
    }
    fn is_newline(self) -> bool {
        self.code == 10 || self.code == 13
    }
    fn is_space(self) -> bool {
        self.class == class::SPACE
    }
    fn is_number(self) -> bool {
        self.class == class::NUMBER
    }
    fn takes_upper(self) -> bool {
        matches!(self.class, class::UPPER | class::CASELESS | class::MARK)
    }
    fn takes_lower(self) -> bool {
        matches!(self.class, class::LOWER | class::CASELESS | class::MARK)
    }
}

impl At<'_> {
    #[inline(always)]
    fn get(&self, at: usize) -> Option<Char> {
        if at >= self.end {
            return None;
        }
        let (code, length) = decode(self.text, at);
        Some(Char { code, class: self.classes.get(code), next: at + length })
    }

    /// Where a run of characters that pass ends.
    #[inline(always)]
    fn run(&self, mut at: usize, pass: impl Fn(Char) -> bool) -> usize {
        while let Some(found) = self.get(at).filter(|found| pass(*found)) {
            at = found.next;
        }
        at
    }

    fn up_to(&self, mut at: usize, most: usize, pass: impl Fn(Char) -> bool) -> usize {
        for _ in 0..most {
            match self.get(at).filter(|found| pass(*found)) {
                Some(found) => at = found.next,
                None => break,
            }
        }
        at
    }

    /// Where a contraction that starts at the apostrophe `at` ends; `at` itself where there is none.
    fn contraction(&self, at: usize, fold: bool) -> usize {
        let rest = &self.text[at.min(self.end)..self.end];
        at + contraction(rest, fold)
    }

    /// White space that starts at `from`: `\s*[\r\n]+|\s+(?!\S)|\s+`, with `lines` for the first.
    fn white(&self, from: usize, lines: bool, last: impl Fn(Char) -> bool) -> usize {
        let (mut at, mut newline, mut before) = (from, None, from);
        while let Some(found) = self.get(at).filter(|found| found.is_space()) {
            before = at;
            at = found.next;
            if found.is_newline() {
                newline = Some(at);
            }
        }
        match newline {
            Some(newline) if lines => newline,
            // What ends the text for the pattern is no `\S`.
            _ if before == from || self.get(at).is_none_or(last) => at,
            _ => before,
        }
    }
}

/// The length of the contraction at the start of a text, 0 for none. Folded, U+017F is an s.
pub fn contraction(rest: &[u8], fold: bool) -> usize {
    if rest.len() < 2 || rest[0] != b'\'' {
        return 0;
    }
    let letter = |index: usize| {
        let byte = rest.get(index).copied().unwrap_or(0);
        if fold { byte.to_ascii_lowercase() } else { byte }
    };
    match (letter(1), letter(2)) {
        (b's' | b't' | b'm' | b'd', _) => 2,
        (b'r' | b'v', b'e') | (b'l', b'l') => 3,
        _ if fold && rest[1..].starts_with("\u{17f}".as_bytes()) => 3,
        _ => 0,
    }
}

fn gpt2(at: &At<'_>, digits: bool, from: usize) -> usize {
    let Some(first) = at.get(from) else { return at.end };
    if digits && first.is_number() {
        return first.next;
    }
    let short = at.contraction(from, false);
    if short > from {
        return short;
    }
    let (start, head) = match at.get(first.next) {
        Some(second) if first.code == 32 && !(digits && second.is_number()) => (first.next, second),
        _ => (from, first),
    };
    if head.is_letter() {
        return at.run(start, Char::is_letter);
    }
    if head.is_number() {
        return at.run(start, Char::is_number);
    }
    if !head.is_space() {
        return at.run(start, |c| !c.is_letter() && !c.is_number() && !c.is_space());
    }
    at.white(from, false, |next| digits && next.is_number())
}

fn words(at: &At<'_>, marks: bool, digits: usize, from: usize) -> usize {
    let letter = |c: Char| c.is_letter() || (marks && c.class == class::MARK);
    let other = |c: Char| !c.is_space() && !c.is_number() && !letter(c);
    let Some(first) = at.get(from) else { return at.end };
    let short = at.contraction(from, true);
    if short > from {
        return short;
    }
    if letter(first) {
        return at.run(first.next, letter);
    }
    if first.is_number() {
        return at.up_to(from, digits, Char::is_number);
    }
    let second = at.get(first.next);
    if !first.is_newline() && second.is_some_and(letter) {
        return at.run(first.next, letter);
    }
    let start = if first.code == 32 { first.next } else { from };
    if at.get(start).is_some_and(other) {
        return at.run(at.run(start, other), Char::is_newline);
    }
    at.white(from, true, |_| false)
}

fn cased(at: &At<'_>, contractions: bool, digits: usize, from: usize) -> usize {
    let Some(first) = at.get(from) else { return at.end };
    let prefix = !first.is_newline() && !first.is_letter() && !first.is_number();
    // `upper*lower+`
    let lower = |start: usize| {
        let (mut at_char, mut last) = (start, None);
        while let Some(found) = at.get(at_char).filter(|found| found.takes_upper()) {
            if found.takes_lower() {
                last = Some(found.next);
            }
            at_char = found.next;
        }
        match at.get(at_char) {
            Some(found) if found.takes_lower() => Some(at.run(at_char, Char::takes_lower)),
            _ => last,
        }
    };
    // `upper+lower*`
    let upper = |start: usize| {
        let stop = at.run(start, Char::takes_upper);
        (stop > start).then(|| at.run(stop, Char::takes_lower))
    };
    let with =
        |word: &dyn Fn(usize) -> Option<usize>| prefix.then(|| word(first.next)).flatten().or_else(|| word(from));
    if let Some(word) = with(&lower).or_else(|| with(&upper)) {
        return if contractions { at.contraction(word, true) } else { word };
    }
    if first.is_number() {
        return at.up_to(from, digits, Char::is_number);
    }
    let other = |c: Char| !c.is_space() && !c.is_number() && !c.is_letter();
    let start = if first.code == 32 { first.next } else { from };
    if at.get(start).is_some_and(other) {
        return at.run(at.run(start, other), |c| c.is_newline() || c.code == u32::from(b'/'));
    }
    at.white(from, true, |_| false)
}

/// Whether DeepSeek's second pattern cuts a character out.
#[inline(always)]
pub fn is_han(code: u32) -> bool {
    (0x4e00..=0x9fa5).contains(&code) || (0x3040..=0x30ff).contains(&code)
}

fn deepseek(whole: &At<'_>, from: usize) -> usize {
    let Some(first) = whole.get(from) else { return whole.end };
    if first.is_number() {
        return whole.up_to(from, 3, Char::is_number);
    }
    // The third pattern sees only what lies on the same side of the second one's cuts.
    let han = is_han(first.code);
    let get = |at: usize| whole.get(at).filter(|c| !c.is_number() && is_han(c.code) == han);
    let run = |mut at: usize, pass: &dyn Fn(Char) -> bool| {
        while let Some(found) = get(at).filter(|found| pass(*found)) {
            at = found.next;
        }
        at
    };
    let letter = |c: Char| c.is_letter() || c.class == class::MARK;
    let ascii_letter = |c: Char| c.code < 128 && (c.code as u8).is_ascii_alphabetic();
    let sign = |c: Char| matches!(c.class, class::PUNCTUATION | class::SYMBOL);
    let second = get(first.next);
    if first.code < 128 && (first.code as u8).is_ascii_punctuation() && second.is_some_and(ascii_letter) {
        return run(first.next, &ascii_letter);
    }
    if letter(first) {
        return run(first.next, &letter);
    }
    if !first.is_newline() && !sign(first) && second.is_some_and(letter) {
        return run(first.next, &letter);
    }
    let start = if first.code == 32 { first.next } else { from };
    if get(start).is_some_and(sign) {
        return run(run(start, &sign), &Char::is_newline);
    }
    if first.is_space() {
        let (mut at, mut newline, mut before) = (from, None, from);
        while let Some(found) = get(at).filter(|found| found.is_space()) {
            before = at;
            at = found.next;
            if found.is_newline() {
                newline = Some(at);
            }
        }
        return match newline {
            Some(newline) => newline,
            None if before == from || get(at).is_none() => at,
            None => before,
        };
    }
    // No alternative takes it: it stays whole with the others of its kind before the next match.
    let mut at = first.next;
    while let Some(found) = get(at) {
        if letter(found) || sign(found) || found.is_space() || get(found.next).is_some_and(letter) {
            break;
        }
        at = found.next;
    }
    at
}

fn spaces(text: &[u8], newlines: bool, glue: &[bool; 256], from: usize, end: usize) -> usize {
    let mut at = from;
    if newlines && text[at] == b'\n' {
        while at < end && text[at] == b'\n' {
            at += 1;
        }
        return at;
    }
    while at < end && text[at] == b' ' {
        at += 1;
    }
    while at < end && !(newlines && text[at] == b'\n') {
        if text[at] == b' ' && text[at - 1] != b' ' && !glue[usize::from(text[at - 1])] {
            break;
        }
        at += 1;
    }
    at
}
