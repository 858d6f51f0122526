use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;
use rft_core::readers::{Reader, hash, members};
use rft_core::spec::Source;
use serde_json::{Value, json};

use crate::support::{CHATML, Case, document};

pub fn source(path: &Path) -> Source {
    serde_json::from_value(json!({"path": path, "name": "file"})).unwrap()
}

/// Rows as the parser sees them, with their lines.
fn rows(source: &Source) -> rft_core::Result<Vec<(u64, String)>> {
    let mut reader = Reader::open(source)?;
    let mut rows = Vec::new();
    while let Some(block) = reader.next_block(7, 1 << 20)? {
        rows.extend(block.rows().map(|(line, bytes)| (line, String::from_utf8_lossy(bytes).into_owned())));
    }
    assert_eq!(reader.finish()?, hash(source)?, "what was read is what the key covers");
    Ok(rows)
}

pub fn texts(values: &[String]) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(values))
}

pub fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true))).unwrap()
}

pub fn parquet_of(batch: &RecordBatch, rows_in_a_group: usize, compression: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_max_row_group_row_count(Some(rows_in_a_group))
        .build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    bytes
}

pub fn arrow_of(batch: &RecordBatch, file: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    if file {
        let mut writer = arrow_ipc::writer::FileWriter::try_new(&mut bytes, &batch.schema()).unwrap();
        writer.write(batch).unwrap();
        writer.finish().unwrap();
    } else {
        let mut writer = arrow_ipc::writer::StreamWriter::try_new(&mut bytes, &batch.schema()).unwrap();
        writer.write(batch).unwrap();
        writer.finish().unwrap();
    }
    bytes
}

fn separated(rows: &[(String, String)], by: char) -> Vec<u8> {
    let quoted = |cell: &str| format!("\"{}\"", cell.replace('"', "\"\""));
    let mut text = format!("prompt{by}completion\r\n");
    for (prompt, completion) in rows {
        text.push_str(&format!("{}{by}{}\r\n", quoted(prompt), quoted(completion)));
    }
    text.into_bytes()
}

pub fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        // Written by hand: the builder itself refuses the names that these tests are about.
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append(&header, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

/// A zip of stored members.
pub fn zip_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in files {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(content);
        let (start, length) = (bytes.len() as u32, content.len() as u32);
        let mut common = Vec::new();
        for field in [20u16, 0, 0, 0, 0] {
            common.extend(field.to_le_bytes()); // version, flags, method, time, date
        }
        common.extend(hasher.finalize().to_le_bytes());
        common.extend(length.to_le_bytes());
        common.extend(length.to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend(0u16.to_le_bytes());
        bytes.extend(b"PK\x03\x04");
        bytes.extend(&common);
        bytes.extend(name.as_bytes());
        bytes.extend(*content);
        directory.extend(b"PK\x01\x02\x14\x00");
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(start.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, length, count) = (bytes.len() as u32, directory.len() as u32, files.len() as u16);
    bytes.extend(directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend(count.to_le_bytes());
    bytes.extend(count.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(start.to_le_bytes());
    bytes.extend([0, 0]);
    bytes
}

/// Ids and bits of every document of a file, and the lines they came from.
fn prepared(name: &str, bytes: &[u8], member: Option<&str>) -> Vec<(Vec<u32>, Vec<bool>)> {
    let case = Case::of_bytes(name, bytes, CHATML).with_source("member", json!(member));
    let (_, store) = case.made();
    (0..store.num_documents()).map(|index| document(&store, index)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn the_same_rows_give_the_same_tokens_through_every_format(
        rows in prop::collection::vec(("(?s:.{0,30})", "[ -~\n\r\t\"\\\\,\u{2028}é日😀]{1,30}"), 1..30), group in 1usize..9,
    ) {
        let lines: Vec<String> =
            rows.iter().map(|(prompt, completion)| json!({"prompt": prompt, "completion": completion}).to_string()).collect();
        let jsonl = lines.join("\n").into_bytes();
        let wanted = prepared("rows.jsonl", &jsonl, None);
        prop_assert_eq!(wanted.len(), rows.len());
        let columns: (Vec<String>, Vec<String>) = rows.iter().cloned().unzip();
        let table = batch(vec![
            ("unused", Arc::new(Float64Array::from(vec![f64::NAN; rows.len()]))),
            ("completion", texts(&columns.1)),
            ("prompt", texts(&columns.0)),
        ]);
        let parquet = parquet_of(&table, group, Compression::SNAPPY);
        let files: Vec<(&str, Vec<u8>)> = vec![
            ("rows.json", format!("[{}]", lines.join(",\n")).into_bytes()),
            ("rows.jsonl.gz", [gz(&jsonl[..jsonl.len() / 2]), gz(&jsonl[jsonl.len() / 2..])].concat()),
            ("rows.jsonl.zst", zstd::encode_all(&jsonl[..], 1).unwrap()),
            ("rows.csv", separated(&rows, ',')),
            ("rows.tsv.gz", gz(&separated(&rows, '\t'))),
            ("rows.parquet", parquet.clone()),
            ("zstd.parquet", parquet_of(&table, 1000, Compression::ZSTD(Default::default()))),
            ("stream.arrow", arrow_of(&table, false)),
            ("file.arrow", arrow_of(&table, true)),
            ("stream.arrow.zst", zstd::encode_all(&arrow_of(&table, false)[..], 1).unwrap()),
        ];
        for (name, bytes) in &files {
            prop_assert_eq!(&prepared(name, bytes, None), &wanted, "{}", name);
        }
        let inside = [("a/rows.parquet", &parquet[..]), ("b.jsonl", &jsonl[..])];
        for (name, bytes) in [("x.zip", zip_of(&inside)), ("x.tar", tar_of(&inside)), ("x.tar.gz", gz(&tar_of(&inside)))] {
            for (member, _) in inside {
                prop_assert_eq!(&prepared(name, &bytes, Some(member)), &wanted, "{} {}", name, member);
            }
        }
    }

    /// Any damage to any file is an error or other rows, never a panic or a hang.
    #[test]
    fn damaged_files_are_refused_or_read(
        which in 0usize..6, hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let table = batch(vec![("text", texts(&(0..40).map(|n| format!("row {n}")).collect::<Vec<_>>()))]);
        let jsonl = b"{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
        let (name, mut bytes) = match which {
            0 => ("a.parquet", parquet_of(&table, 9, Compression::SNAPPY)),
            1 => ("a.arrow", arrow_of(&table, false)),
            2 => ("b.arrow", arrow_of(&table, true)),
            3 => ("a.csv", separated(&[("a".into(), "b".into())], ',')),
            4 => ("a.zip", zip_of(&[("x.jsonl", jsonl)])),
            _ => ("a.tar", tar_of(&[("x.jsonl", jsonl)])),
        };
        for (at, byte) in hits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        if which < 4 {
            let _ = rows(&source(&path));
        } else if let Ok(found) = members(&path) {
            for member in found {
                let mut source = source(&path);
                source.member = Some(member.name);
                let _ = rows(&source);
            }
        }
    }
}

fn written(folder: &tempfile::TempDir, name: &str, bytes: &[u8]) -> Source {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    source(&path)
}

#[test]
fn only_the_columns_of_the_format_are_read_of_forty() {
    let folder = tempfile::tempdir().unwrap();
    let noise = |column: usize| -> Vec<String> {
        // Digits that a page cannot pack away.
        (0..2000u64).map(|row| format!("{:x}", (row + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ column as u64)).collect()
    };
    let names: Vec<String> = (0..40)
        .map(|n| match n {
            7 => "prompt".into(),
            20 => "completion".into(),
            39 => "loss_weight".into(),
            n => format!("column_{n}"),
        })
        .collect();
    let columns = names.iter().enumerate().map(|(n, name)| match n {
        39 => (name.as_str(), Arc::new(Float64Array::from(vec![0.5; 2000])) as ArrayRef),
        n => (name.as_str(), texts(&noise(n))),
    });
    let table = batch(columns.collect());
    let bytes = parquet_of(&table, 500, Compression::UNCOMPRESSED);
    let source = written(&folder, "wide.parquet", &bytes);
    let mut reader = Reader::open(&source).unwrap();
    let block = reader.next_block(10, 1 << 20).unwrap().unwrap();
    assert_eq!(
        serde_json::from_slice::<Value>(block.row(1).1).unwrap(),
        json!({"prompt": noise(7)[1], "completion": noise(20)[1], "loss_weight": 0.5})
    );
    while reader.next_block(1000, 1 << 20).unwrap().is_some() {}
    // Two of 39 text columns, once for the sample's first group and once whole, and the footer.
    let share = reader.bytes_taken() as f64 / bytes.len() as f64;
    assert!(share < 0.12, "{share:.3} of the file");
    let (first, length) = reader.finish().unwrap();
    assert_eq!(length, bytes.len() as u64);
    let at = |column: usize| {
        let wanted = noise(column)[900].clone();
        bytes.windows(wanted.len()).position(|window| window == wanted.as_bytes()).unwrap()
    };
    for (column, counts) in [(3, false), (7, true)] {
        let mut changed = bytes.clone();
        changed[at(column)] ^= 1;
        let other = written(&folder, "changed.parquet", &changed);
        assert_eq!(hash(&other).unwrap().0 != first, counts, "column {column}");
    }
}

#[test]
fn rows_of_columns_are_counted_from_one_and_bad_ones_name_their_field() {
    let table = batch(vec![
        ("text", texts(&["a".into(), "b".into(), "c".into()])),
        ("loss_weight", Arc::new(Float64Array::from(vec![Some(0.5), Some(f64::NAN), None]))),
    ]);
    let bytes = parquet_of(&table, 2, Compression::UNCOMPRESSED);
    let error = Case::of_bytes("x.parquet", &bytes, CHATML).run().unwrap_err();
    assert_eq!(error.place, "x.parquet:2, field \"loss_weight\"");
    assert!(error.problem.contains("NaN"), "{error}");
    let (counts, store) = Case::of_bytes("x.parquet", &bytes, CHATML).with("on_error", json!("skip")).made();
    assert_eq!(counts["dropped"], json!({"bad row": 1}));
    assert_eq!((store.origin(0).1, store.origin(1).1), (1, 3));
    assert_eq!((store.weight(0), store.weight(store.range(1).start)), (0.5, 1.0));
}

#[test]
fn a_table_of_no_known_format_shows_all_its_columns() {
    let table = batch(vec![
        ("question", texts(&["2+2?".into()])),
        ("answer", texts(&["4".into()])),
        ("image", Arc::new(arrow_array::BinaryArray::from_iter_values([b"\xff\x00"]))),
    ]);
    for (name, bytes) in [
        ("x.parquet", parquet_of(&table, 9, Compression::UNCOMPRESSED)),
        ("x.arrow", arrow_of(&table, false)),
        ("x.csv", b"question,answer,image\n2+2?,4,-\n".to_vec()),
    ] {
        let error = Case::of_bytes(name, &bytes, CHATML).run().unwrap_err();
        assert!(error.problem.contains("\"question\", \"answer\", \"image\""), "{error}");
        assert!(error.remedy.contains("instruction = \"question\", output = \"answer\""), "{error}");
        let named = Case::of_bytes(name, &bytes, CHATML);
        let (counts, _) = named.with_source("fields", json!({"prompt": "question", "completion": "answer"})).made();
        assert_eq!(counts["kept"], 1);
        let missing = Case::of_bytes(name, &bytes, CHATML).with_source("format", json!("text")).run().unwrap_err();
        assert!(missing.problem.contains("no field \"text\" (the row has the fields \"question\""), "{missing}");
    }
}

#[test]
fn csv_cells_are_text_but_for_numbers_and_json() {
    let folder = tempfile::tempdir().unwrap();
    let chat = r#"[{""role"":""user"",""content"":""x""}]"#;
    let text =
        format!("\u{feff}id,messages,loss_weight,tools\r\n1,\"{chat}\",0.5,\r\n\r\n2,\"[]}},{{\",1e3,\"[1,\n2]\"\r\n");
    let found = rows(&written(&folder, "a.csv", text.as_bytes())).unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!(
        serde_json::from_str::<Value>(&found[0].1).unwrap(),
        json!({"messages": [{"role": "user", "content": "x"}], "loss_weight": 0.5, "tools": null})
    );
    assert_eq!(
        serde_json::from_str::<Value>(&found[1].1).unwrap(),
        json!({"messages": "[]},{", "loss_weight": 1e3, "tools": [1, 2]})
    );
    assert_eq!([found[0].0, found[1].0], [2, 4]);
}

#[test]
fn csv_lines_with_too_few_or_too_many_cells_are_bad_rows() {
    let case = |on_error: &str| {
        Case::of_bytes("a.csv", b"text,n\nok,1\nshort\nok,2\na,b,c\n", CHATML).with("on_error", json!(on_error))
    };
    let error = case("fail").run().unwrap_err();
    assert_eq!(error.place, "a.csv:3");
    assert!(error.problem.contains("1 cells, the first line names 2 columns"), "{error}");
    let (counts, _) = case("skip").made();
    assert_eq!((&counts["kept"], &counts["dropped"]), (&json!(2), &json!({"bad row": 2})));
    let folder = tempfile::tempdir().unwrap();
    let error = rows(&written(&folder, "b.csv", b"text,text\na,b\n")).unwrap_err();
    assert!(error.problem.contains("two columns are called \"text\""), "{error}");
    let latin = Case::of_bytes("c.csv", b"text\nok\nna\xefve\n", CHATML).run().unwrap_err();
    assert_eq!(latin.place, "c.csv:3");
    assert!(latin.problem.contains("not UTF-8"), "{latin}");
}

#[test]
fn a_csv_quote_that_nothing_closes_swallows_no_rows() {
    let unclosed = b"text,n\nok,1\n\"never closed,2\nlost,3\nlost too,4\n";
    for on_error in ["fail", "skip"] {
        let error = Case::of_bytes("a.csv", unclosed, CHATML).with("on_error", json!(on_error)).run().unwrap_err();
        assert_eq!(error.place, "a.csv:3");
        assert!(error.problem.contains("all 3 lines from here"), "{error}");
    }
    // Closed by a later row's quote, with the right number of cells.
    let closed = b"text,n\n\"opened,1\nlost,2\n\"closed\",3\nok,4\n";
    let error = Case::of_bytes("a.csv", closed, CHATML).run().unwrap_err();
    assert!(error.place == "a.csv:2" && error.problem.contains("odd number of quotes in the 3 lines"), "{error}");
    // An inch mark is no quote, and quotes with line ends between them are fine.
    let fine = b"text\n5\" wide\n\"two\nlines\"\n7\" wide\n";
    let (counts, _) = Case::of_bytes("a.csv", fine, CHATML).made();
    assert_eq!(counts["kept"], json!(3));
}

#[test]
fn what_is_not_what_its_name_says_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let problem = |name: &str, bytes: &[u8]| rows(&written(&folder, name, bytes)).unwrap_err().problem;
    let table = batch(vec![("text", texts(&["a".into()]))]);
    let parquet = parquet_of(&table, 9, Compression::UNCOMPRESSED);
    assert_eq!(problem("a.parquet", b""), "an empty file");
    assert_eq!(problem("a.parquet", b"{\"text\": 1}"), "no Parquet file");
    assert_eq!(problem("a.arrow", b"{\"text\": 1}"), "no Arrow IPC file");
    assert!(problem("a.parquet", b"version https://git-lfs.github.com/spec/v1\n").contains("Git LFS pointer"));
    assert!(problem("a.parquet.gz", &gz(&parquet)).contains("Parquet file inside gzip"));
    assert!(problem("a.parquet", &parquet[..parquet.len() - 9]).contains("cannot be read as Parquet"));
    assert_eq!(problem("a.jsonl", &zip_of(&[("x.jsonl", b"{}")])), "an archive");
    assert_eq!(problem("a.jsonl", &gz(&tar_of(&[("x.jsonl", b"{}")]))), "an archive");
    let arrow = arrow_of(&table, false);
    assert!(problem("a.arrow", &arrow[..arrow.len() - 40]).contains("cut short"));
    // What the content says goes before what the name says.
    assert_eq!(rows(&written(&folder, "b.jsonl", &parquet)).unwrap(), [(1, "{\"text\":\"a\"}".to_string())]);
}

/// BO-43: zip, tar and tar.gz with each kind of name or entry that leaves the archive.
#[test]
fn an_archive_that_reaches_outside_is_refused_with_the_members_name() {
    let folder = tempfile::tempdir().unwrap();
    let data: (&str, &[u8]) = ("data.jsonl", b"{\"text\": \"fine\"}");
    let refused = |bytes: &[u8]| {
        let path = folder.path().join("x");
        std::fs::write(&path, bytes).unwrap();
        members(&path).unwrap_err().problem
    };
    for name in ["../evil.txt", "a/../../evil.txt", "/etc/evil.txt", "C:\\evil.txt", "..\\evil.txt"] {
        for bytes in [zip_of(&[data, (name, b"x")]), tar_of(&[data, (name, b"x")]), gz(&tar_of(&[data, (name, b"x")]))]
        {
            assert!(refused(&bytes).contains(&format!("member {name:?}")), "{name}");
        }
    }
    for kind in [tar::EntryType::Symlink, tar::EntryType::Link, tar::EntryType::Char, tar::EntryType::Fifo] {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_path("up").unwrap();
        header.set_link_name("..").unwrap();
        header.set_entry_type(kind);
        header.set_size(0);
        header.set_cksum();
        builder.append(&header, &b""[..]).unwrap();
        assert!(refused(&builder.into_inner().unwrap()).starts_with("member \"up\""), "{kind:?}");
    }
    let mut link = zip_of(&[("up", b"..")]);
    let attributes = link.len() - 22 - 2 - 8; // of the last entry: external attributes, then its offset and name
    link[attributes..attributes + 4].copy_from_slice(&(0o120_777u32 << 16).to_le_bytes());
    let maker = link.windows(4).position(|window| window == b"PK\x01\x02").unwrap() + 5;
    link[maker] = 3; // made on Unix
    assert!(refused(&link).contains("member \"up\": a link"));
    for bytes in [zip_of(&[data, data]), tar_of(&[data, data])] {
        assert!(refused(&bytes).contains("member \"data.jsonl\": the archive has two members of this name"));
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing was unpacked");
    for bytes in [zip_of(&[data]), tar_of(&[data])] {
        std::fs::write(folder.path().join("x"), bytes).unwrap();
        let found = members(&folder.path().join("x")).unwrap();
        assert_eq!((found.len(), found[0].name.as_str(), found[0].size), (1, "data.jsonl", 16));
    }
}

#[test]
fn a_member_with_a_wrong_checksum_or_length_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = zip_of(&[("a.jsonl", b"{\"text\": \"one\"}\n")]);
    let mut source = written(&folder, "x.zip", &bytes);
    source.member = Some("a.jsonl".into());
    assert_eq!(rows(&source).unwrap().len(), 1);
    let mut changed = bytes.clone();
    let at = bytes.windows(3).position(|window| window == b"one").unwrap();
    changed[at] = b'O';
    std::fs::write(folder.path().join("x.zip"), changed).unwrap();
    assert!(rows(&source).unwrap_err().problem.contains("checksum"));
    let error = hash(&source).unwrap_err();
    assert!(error.kind == rft_core::Kind::Data && error.place == "file:1", "{error}");
    source.member = Some("b.jsonl".into());
    assert!(rows(&source).unwrap_err().problem.contains("no member \"b.jsonl\""));
}
