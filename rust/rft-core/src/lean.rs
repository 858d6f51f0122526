//! A chat row read without a tree: roles and texts, where the row holds nothing that a template could see beside them.
//!
//! It says yes to a part of what [`Parser::parse`](crate::example::Parser::parse) reads, and then with the same roles and
//! texts; any other row, and any fault, is left to that parser.

use std::ops::Range;
use std::sync::Arc;

/// Deeper values are left to the other parser.
const MAX_DEPTH: usize = 64;

/// Where a text lies.
#[derive(Clone, Debug)]
enum Piece {
    /// In the row, without escapes.
    Row(Range<usize>),
    /// Unescaped, in the arena.
    Arena(Range<usize>),
}

/// A chat row. Its buffers are used again for the next one.
#[derive(Debug, Default)]
pub struct Lean {
    /// Role of each message, an index into [`ROLES`](crate::example::ROLES).
    pub roles: Vec<u8>,
    contents: Vec<Piece>,
    arena: String,
    unused: Vec<Range<usize>>,
    /// Fields of the row that are not used.
    pub unused_names: Arc<[String]>,
}

/// The names that a source's chat rows use.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    /// What the list of messages may be called; a row has one of them.
    pub messages: Vec<String>,
    pub role: String,
    pub content: String,
    /// What this source calls the roles whose messages need no more than their text: an index into [`ROLES`](crate::example::ROLES).
    pub roles: Vec<(String, u8)>,
    /// Fields of the row that mean something, so that a row with them is left to the other parser.
    pub telling: Vec<String>,
}

impl Lean {
    /// Reads a row; false where it is not a plain one.
    pub(crate) fn read(&mut self, row: &str, names: &Names) -> bool {
        self.roles.clear();
        self.contents.clear();
        self.arena.clear();
        self.unused.clear();
        let mut at = At { bytes: row.as_bytes(), pos: 0 };
        self.object(&mut at, row, names).is_some()
    }

    /// The text of a message.
    pub fn content<'r>(&'r self, index: usize, row: &'r str) -> &'r str {
        match &self.contents[index] {
            Piece::Row(range) => &row[range.clone()],
            Piece::Arena(range) => &self.arena[range.clone()],
        }
    }

    fn object(&mut self, at: &mut At<'_>, row: &str, names: &Names) -> Option<()> {
        let mut found = false;
        at.space();
        at.expect(b'{')?;
        at.space();
        if at.peek()? == b'}' {
            return None;
        }
        loop {
            let key = at.plain_string()?;
            at.space();
            at.expect(b':')?;
            at.space();
            let name = &row[key.clone()];
            if names.messages.iter().any(|known| known == name) {
                if found {
                    return None;
                }
                found = true;
                self.messages(at, row, names)?;
            } else if names.telling.iter().any(|telling| telling == name) {
                at.null()?;
            } else {
                if at.peek()? != b'n' {
                    self.unused.push(key);
                }
                at.skip_value(0)?;
            }
            at.space();
            match at.next()? {
                b',' => at.space(),
                b'}' => break,
                _ => return None,
            }
        }
        at.space();
        if at.pos != at.bytes.len() || !found || self.roles.is_empty() {
            return None;
        }
        let same = self.unused.len() == self.unused_names.len()
            && self.unused.iter().zip(self.unused_names.iter()).all(|(range, name)| &row[range.clone()] == name);
        if !same {
            let name = |index: usize| &row[self.unused[index].clone()];
            if (1..self.unused.len()).any(|one| (0..one).any(|other| name(one) == name(other))) {
                return None;
            }
            self.unused_names = self.unused.iter().map(|range| row[range.clone()].to_string()).collect();
        }
        Some(())
    }

    fn messages(&mut self, at: &mut At<'_>, row: &str, names: &Names) -> Option<()> {
        at.expect(b'[')?;
        at.space();
        loop {
            self.message(at, row, names)?;
            at.space();
            match at.next()? {
                b',' => at.space(),
                b']' => return Some(()),
                _ => return None,
            }
        }
    }

    fn message(&mut self, at: &mut At<'_>, row: &str, names: &Names) -> Option<()> {
        let (mut role, mut content) = (None, None);
        at.expect(b'{')?;
        at.space();
        loop {
            let key = at.plain_string()?;
            at.space();
            at.expect(b':')?;
            at.space();
            let name = &row[key];
            if name == names.role && role.is_none() {
                role = Some(at.plain_string()?);
            } else if name == names.content && content.is_none() {
                content = Some(self.text(at, row)?);
            } else if name == names.role || name == names.content {
                return None;
            } else {
                at.null()?;
            }
            at.space();
            match at.next()? {
                b',' => at.space(),
                b'}' => break,
                _ => return None,
            }
        }
        let theirs = &row[role?];
        self.roles.push(names.roles.iter().find(|(known, _)| known == theirs)?.1);
        self.contents.push(content?);
        Some(())
    }

    fn text(&mut self, at: &mut At<'_>, row: &str) -> Option<Piece> {
        at.expect(b'"')?;
        let start = at.pos;
        at.pos += at.run()?;
        if at.peek()? == b'"' {
            at.pos += 1;
            return Some(Piece::Row(start..at.pos - 1));
        }
        let begin = self.arena.len();
        let mut from = start;
        loop {
            self.arena.push_str(&row[from..at.pos]);
            match at.next()? {
                b'"' => return Some(Piece::Arena(begin..self.arena.len())),
                b'\\' => self.arena.push(at.escaped()?),
                _ => return None,
            }
            from = at.pos;
            at.pos += at.run()?;
        }
    }
}

/// A place in a row.
struct At<'r> {
    bytes: &'r [u8],
    pos: usize,
}

impl At<'_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.pos).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.pos += 1;
        Some(byte)
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.pos += 1;
        }
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        let found = self.bytes[self.pos..].starts_with(word);
        self.pos += word.len();
        found.then_some(())
    }

    fn null(&mut self) -> Option<()> {
        self.word(b"null")
    }

    /// Bytes up to a quote, a backslash or a control character, eight at a time.
    fn run(&self) -> Option<usize> {
        const ONES: u64 = 0x0101_0101_0101_0101;
        const HIGHS: u64 = 0x8080_8080_8080_8080;
        let zero = |word: u64| word.wrapping_sub(ONES) & !word & HIGHS;
        let rest = &self.bytes[self.pos..];
        let mut at = 0;
        while let Some(chunk) = rest.get(at..at + 8) {
            let mut eight = [0u8; 8];
            eight.copy_from_slice(chunk);
            let word = u64::from_le_bytes(eight);
            let quote = zero(word ^ (ONES * u64::from(b'"')));
            let back = zero(word ^ (ONES * u64::from(b'\\')));
            let control = word.wrapping_sub(ONES * 0x20) & !word & HIGHS;
            let stop = quote | back | control;
            if stop != 0 {
                // The lowest flag is exact; borrows can only set higher ones.
                return Some(at + (stop.trailing_zeros() / 8) as usize);
            }
            at += 8;
        }
        let stop = rest[at..].iter().position(|byte| matches!(byte, b'"' | b'\\') || *byte < 0x20)?;
        Some(at + stop)
    }

    /// A string without escapes.
    fn plain_string(&mut self) -> Option<Range<usize>> {
        self.expect(b'"')?;
        let start = self.pos;
        self.pos += self.run()?;
        self.expect(b'"')?;
        Some(start..self.pos - 1)
    }

    /// What stands behind a backslash. Half a surrogate pair is left to the other parser.
    fn escaped(&mut self) -> Option<char> {
        Some(match self.next()? {
            b'n' => '\n',
            b'"' => '"',
            b'\\' => '\\',
            b't' => '\t',
            b'r' => '\r',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'u' => {
                let first = self.hex()?;
                match first {
                    0xd800..=0xdbff => {
                        self.expect(b'\\')?;
                        self.expect(b'u')?;
                        let second = self.hex()?;
                        if !(0xdc00..=0xdfff).contains(&second) {
                            return None;
                        }
                        char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00))?
                    }
                    _ => char::from_u32(first)?,
                }
            }
            _ => return None,
        })
    }

    fn hex(&mut self) -> Option<u32> {
        let mut value = 0;
        for _ in 0..4 {
            value = value * 16 + (self.next()? as char).to_digit(16)?;
        }
        Some(value)
    }

    /// Any value, checked as strictly as the other parser does; it reads no number as one.
    fn skip_value(&mut self, depth: usize) -> Option<()> {
        match self.peek()? {
            b'"' => self.skip_string(),
            b'{' => self.skip_list(depth, b'}', true),
            b'[' => self.skip_list(depth, b']', false),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            _ => self.skip_number(),
        }
    }

    fn skip_string(&mut self) -> Option<()> {
        self.expect(b'"')?;
        loop {
            self.pos += self.run()?;
            match self.next()? {
                b'"' => return Some(()),
                b'\\' => {
                    self.escaped()?;
                }
                _ => return None,
            }
        }
    }

    fn skip_list(&mut self, depth: usize, close: u8, named: bool) -> Option<()> {
        if depth >= MAX_DEPTH {
            return None;
        }
        self.pos += 1;
        self.space();
        if self.peek()? == close {
            self.pos += 1;
            return Some(());
        }
        loop {
            if named {
                self.skip_string()?;
                self.space();
                self.expect(b':')?;
                self.space();
            }
            self.skip_value(depth + 1)?;
            self.space();
            match self.next()? {
                b',' => self.space(),
                byte if byte == close => return Some(()),
                _ => return None,
            }
        }
    }

    /// Numbers with an exponent, or with more digits than any 64 bits hold, are left to the other parser.
    fn skip_number(&mut self) -> Option<()> {
        if self.peek()? == b'-' {
            self.pos += 1;
        }
        let digits = self.digits()?;
        if digits.len() > 1 && self.bytes[digits.start] == b'0' {
            return None;
        }
        if self.peek() == Some(b'.') {
            self.pos += 1;
            self.digits()?;
        }
        (!matches!(self.peek(), Some(b'e' | b'E'))).then_some(())
    }

    fn digits(&mut self) -> Option<Range<usize>> {
        let start = self.pos;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.pos += 1;
        }
        (start < self.pos && self.pos - start <= 18).then_some(start..self.pos)
    }
}
