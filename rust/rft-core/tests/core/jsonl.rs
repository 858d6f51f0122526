use std::io::Write;
use std::path::Path;

use proptest::prelude::*;
use rft_core::jsonl::Layout;
use rft_core::readers::{Reader, hash};

use crate::readers::source;

/// Every row of a file, with its line.
fn rows(path: &Path, max_rows: usize, max_bytes: usize) -> rft_core::Result<Vec<(u64, Vec<u8>)>> {
    let mut reader = Reader::open(&source(path))?;
    let mut rows = Vec::new();
    while let Some(block) = reader.next_block(max_rows, max_bytes)? {
        assert!(block.len() <= max_rows);
        rows.extend(block.rows().map(|(line, bytes)| (line, bytes.to_vec())));
    }
    assert_eq!(reader.finish()?, hash(&source(path))?);
    Ok(rows)
}

fn compressed(bytes: &[u8], how: usize) -> Vec<u8> {
    let gzip = |part: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(part).unwrap();
        encoder.finish().unwrap()
    };
    let middle = bytes.len() / 2;
    match how {
        1 => [gzip(&bytes[..middle]), gzip(&bytes[middle..])].concat(),
        2 => [&bytes[..middle], &bytes[middle..]].map(|part| zstd::encode_all(part, 1).unwrap()).concat(),
        _ => bytes.to_vec(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rows_do_not_depend_on_ends_marks_compression_or_blocks(
        lines in prop::collection::vec("[ -Zb-~é]{0,40}", 0..40),
        crlf: bool, mark: bool, final_end: bool, how in 0usize..3, max_rows in 1usize..9, max_bytes in 1usize..200,
    ) {
        // The first visible byte decides between lines and an array: rows are objects, so no line starts with '['.
        let lines: Vec<String> = lines.into_iter().map(|line| line.replace('[', "(")).collect();
        let end = if crlf { "\r\n" } else { "\n" };
        let mut content = lines.join(end);
        if final_end {
            content.push_str(end);
        }
        let mut bytes = if mark { vec![0xef, 0xbb, 0xbf] } else { vec![] };
        bytes.extend(content.as_bytes());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), compressed(&bytes, how)).unwrap();
        let wanted: Vec<(u64, Vec<u8>)> = lines
            .iter()
            .enumerate()
            .filter(|(_, line)| !line.trim_ascii().is_empty())
            .map(|(index, line)| (index as u64 + 1, line.clone().into_bytes()))
            .collect();
        prop_assert_eq!(rows(file.path(), max_rows, max_bytes).unwrap(), wanted);
    }

    #[test]
    fn an_array_gives_its_elements(
        texts in prop::collection::vec("[ -~\n\t\\\\\"\\[\\]{}é]{0,30}", 0..20), pretty: bool, how in 0usize..3, max_rows in 1usize..5,
    ) {
        let elements: Vec<serde_json::Value> =
            texts.iter().map(|text| serde_json::json!({"text": text, "more": [[1, {"a": text}], []]})).collect();
        let content = if pretty {
            serde_json::to_string_pretty(&elements).unwrap()
        } else {
            serde_json::to_string(&elements).unwrap()
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), compressed(format!("\n {content}\n").as_bytes(), how)).unwrap();
        let found = rows(file.path(), max_rows, 1 << 20).unwrap();
        let parsed: Vec<serde_json::Value> = found.iter().map(|(_, bytes)| serde_json::from_slice(bytes).unwrap()).collect();
        prop_assert_eq!(parsed, elements);
        for (line, bytes) in &found {
            let head = content.lines().nth(*line as usize - 2).unwrap();
            prop_assert!(head.contains(std::str::from_utf8(&bytes[..1]).unwrap()));
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), head in 0usize..4) {
        let heads: [&[u8]; 4] = [b"", b"[", &[0x1f, 0x8b, 8, 0], &[0x28, 0xb5, 0x2f, 0xfd]];
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [heads[head], &bytes].concat()).unwrap();
        let _ = rows(file.path(), 3, 100);
    }
}

#[test]
fn a_row_longer_than_the_buffer_is_one_row() {
    let long = "x".repeat(3 << 20);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{long}\nshort\n{long}")).unwrap();
    let found = rows(file.path(), 10, 1 << 30).unwrap();
    let lengths: Vec<usize> = found.iter().map(|(_, bytes)| bytes.len()).collect();
    assert_eq!(lengths, [3 << 20, 5, 3 << 20]);
}

#[test]
fn a_text_file_is_a_document_a_line_even_when_it_starts_with_a_bracket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.TXT");
    std::fs::write(&path, "[1] a footnote\n\nsecond").unwrap();
    assert_eq!(Reader::open(&source(&path)).unwrap().layout(), Layout::Text);
    assert_eq!(rows(&path, 9, 99).unwrap(), [(1, b"[1] a footnote".to_vec()), (3, b"second".to_vec())]);
}

#[test]
fn broken_files_are_told_with_their_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let problem = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let error = rows(&path, 9, 99).unwrap_err();
        format!("{}: {}", error.place, error.problem)
    };
    assert_eq!(problem(b"[{}\n,{}"), "file:2: the file ends inside its JSON array");
    assert_eq!(problem(b"[{}]\n{}"), "file:2: there is text after the JSON array");
    let zipped = compressed("{\"text\": \"x\"}\n".repeat(1000).as_bytes(), 1);
    assert!(problem(&zipped[..zipped.len() - 9]).contains("damaged or cut short"));
    let zipped = compressed("{\"text\": \"x\"}\n".repeat(1000).as_bytes(), 2);
    assert!(problem(&zipped[..zipped.len() - 3]).contains("damaged or cut short"));
}
