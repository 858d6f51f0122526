//! Arrow columns -> rows of JSON, for the one parser of rows.
//!
//! A null of a struct or of the row itself is left out, because columns cannot say "absent" in any other way; a null in a
//! list stays null. Integers and decimals keep all digits, `float32` is widened as Python does, times become ISO 8601.

use std::io::Write;

use arrow_array::cast::AsArray;
use arrow_array::temporal_conversions as temporal;
use arrow_array::types::{
    Date32Type, Date64Type, Decimal128Type, Decimal256Type, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type,
    Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{
    Array, ArrayRef, BooleanArray, Decimal128Array, Decimal256Array, LargeStringArray, PrimitiveArray, RecordBatch,
    StringArray, StringViewArray,
};
use arrow_buffer::NullBuffer;
use arrow_schema::{DataType, TimeUnit};

use super::json;
use crate::row_error::RowError;

/// The columns of a batch, ready to be written row by row.
pub(super) struct Rows {
    columns: Vec<(Vec<u8>, String, Column)>,
    len: usize,
}

impl Rows {
    pub(super) fn new(batch: &RecordBatch) -> Rows {
        let schema = batch.schema();
        let columns = schema
            .fields()
            .iter()
            .zip(batch.columns())
            .map(|(field, column)| (key(field.name()), field.name().clone(), Column::new(column)))
            .collect();
        Rows { columns, len: batch.num_rows() }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Appends a row as a JSON object, or why it cannot be written. Lenient: with every column, null where there is
    /// nothing or nothing that can be written.
    pub(super) fn write(&self, row: usize, lenient: bool, out: &mut Vec<u8>) {
        let start = out.len();
        if lenient {
            for (number, (key, _, column)) in self.columns.iter().enumerate() {
                out.push(if number == 0 { b'{' } else { b',' });
                out.extend_from_slice(key);
                let value = out.len();
                if column.write(row, out).is_err() {
                    out.truncate(value);
                    out.extend_from_slice(b"null");
                }
            }
            out.push(b'}');
        } else if let Err(refusal) = write_fields(&self.columns, row, out) {
            out.truncate(start);
            json::refuse(&RowError::bad(refusal.field, refusal.problem, refusal.wanted), out);
        }
    }
}

/// A value that JSON cannot hold.
struct Refusal {
    field: String,
    problem: String,
    wanted: &'static str,
}

impl Refusal {
    fn new(problem: String, wanted: &'static str) -> Refusal {
        Refusal { field: String::new(), problem, wanted }
    }

    fn inside(mut self, name: &str) -> Refusal {
        let dot = if self.field.is_empty() || self.field.starts_with('[') { "" } else { "." };
        self.field = format!("{name}{dot}{}", self.field);
        self
    }
}

type Written = Result<(), Refusal>;

struct Column {
    nulls: Option<NullBuffer>,
    values: Values,
}

enum Values {
    Nothing,
    Bool(BooleanArray),
    I8(PrimitiveArray<Int8Type>),
    I16(PrimitiveArray<Int16Type>),
    I32(PrimitiveArray<Int32Type>),
    I64(PrimitiveArray<Int64Type>),
    U8(PrimitiveArray<UInt8Type>),
    U16(PrimitiveArray<UInt16Type>),
    U32(PrimitiveArray<UInt32Type>),
    U64(PrimitiveArray<UInt64Type>),
    F16(PrimitiveArray<Float16Type>),
    F32(PrimitiveArray<Float32Type>),
    F64(PrimitiveArray<Float64Type>),
    Decimal128(Decimal128Array),
    Decimal256(Decimal256Array),
    Text(StringArray),
    LargeText(LargeStringArray),
    TextView(StringViewArray),
    Time(ArrayRef),
    Struct(Vec<(Vec<u8>, String, Column)>),
    /// Begin and end of each list in the values.
    List(Vec<(usize, usize)>, Box<Column>),
    Map(Vec<(usize, usize)>, Box<Column>, Box<Column>),
    /// For each row its place among the values.
    Dictionary(Vec<usize>, Box<Column>),
    Refused(String),
}

fn key(name: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(name.len() + 3);
    json::string(name, &mut key);
    key.push(b':');
    key
}

impl Column {
    fn new(array: &ArrayRef) -> Column {
        let values = values(array);
        // A dictionary's value may be null too; unions and run ends are refused whole.
        Column { nulls: array.logical_nulls(), values }
    }

    fn is_null(&self, row: usize) -> bool {
        matches!(self.values, Values::Nothing) || self.nulls.as_ref().is_some_and(|nulls| nulls.is_null(row))
    }

    fn write(&self, row: usize, out: &mut Vec<u8>) -> Written {
        if self.is_null(row) {
            out.extend_from_slice(b"null");
            return Ok(());
        }
        match &self.values {
            Values::Nothing => out.extend_from_slice(b"null"),
            Values::Bool(array) => out.extend_from_slice(if array.value(row) { b"true" } else { b"false" }),
            Values::I8(array) => display(array.value(row), out),
            Values::I16(array) => display(array.value(row), out),
            Values::I32(array) => display(array.value(row), out),
            Values::I64(array) => display(array.value(row), out),
            Values::U8(array) => display(array.value(row), out),
            Values::U16(array) => display(array.value(row), out),
            Values::U32(array) => display(array.value(row), out),
            Values::U64(array) => display(array.value(row), out),
            Values::F16(array) => float(array.value(row).to_f64(), out)?,
            Values::F32(array) => float(array.value(row).into(), out)?,
            Values::F64(array) => float(array.value(row), out)?,
            Values::Decimal128(array) => out.extend_from_slice(array.value_as_string(row).as_bytes()),
            Values::Decimal256(array) => out.extend_from_slice(array.value_as_string(row).as_bytes()),
            Values::Text(array) => json::string(array.value(row), out),
            Values::LargeText(array) => json::string(array.value(row), out),
            Values::TextView(array) => json::string(array.value(row), out),
            Values::Time(array) => json::string(&time(array, row)?, out),
            Values::Struct(fields) => write_fields(fields, row, out)?,
            Values::List(ends, values) => {
                let (begin, end) = ends[row];
                out.push(b'[');
                for at in begin..end {
                    if at > begin {
                        out.push(b',');
                    }
                    values.write(at, out).map_err(|refusal| refusal.inside(&format!("[{}]", at - begin)))?;
                }
                out.push(b']');
            }
            Values::Map(ends, keys, values) => write_map(ends[row], keys, values, out)?,
            Values::Dictionary(places, values) => values.write(places[row], out)?,
            Values::Refused(what) => {
                return Err(Refusal::new(what.clone(), "text, numbers, lists and structs of these"));
            }
        }
        Ok(())
    }
}

fn write_fields(fields: &[(Vec<u8>, String, Column)], row: usize, out: &mut Vec<u8>) -> Written {
    out.push(b'{');
    let mut first = true;
    for (key, name, column) in fields {
        if column.is_null(row) {
            continue;
        }
        if !first {
            out.push(b',');
        }
        first = false;
        out.extend_from_slice(key);
        column.write(row, out).map_err(|refusal| refusal.inside(name))?;
    }
    out.push(b'}');
    Ok(())
}

fn write_map((begin, end): (usize, usize), keys: &Column, values: &Column, out: &mut Vec<u8>) -> Written {
    out.push(b'{');
    for at in begin..end {
        if at > begin {
            out.push(b',');
        }
        let start = out.len();
        keys.write(at, out)?;
        if out.get(start) != Some(&b'"') {
            return Err(Refusal::new("a map whose keys are not text".into(), "a map with text as keys"));
        }
        out.push(b':');
        values.write(at, out)?;
    }
    out.push(b'}');
    Ok(())
}

fn display(value: impl std::fmt::Display, out: &mut Vec<u8>) {
    // Writing to a Vec does not fail.
    let _ = write!(out, "{value}");
}

fn float(value: f64, out: &mut Vec<u8>) -> Written {
    if !value.is_finite() {
        return Err(Refusal::new(format!("{value} is no number of JSON"), "a finite number, or null"));
    }
    serde_json::to_writer(out, &value).map_err(|e| Refusal::new(e.to_string(), "a number"))
}

fn values(array: &ArrayRef) -> Values {
    let list = |values: &ArrayRef| Box::new(Column::new(values));
    match array.data_type() {
        DataType::Null => Values::Nothing,
        DataType::Boolean => Values::Bool(array.as_boolean().clone()),
        DataType::Int8 => Values::I8(array.as_primitive().clone()),
        DataType::Int16 => Values::I16(array.as_primitive().clone()),
        DataType::Int32 => Values::I32(array.as_primitive().clone()),
        DataType::Int64 => Values::I64(array.as_primitive().clone()),
        DataType::UInt8 => Values::U8(array.as_primitive().clone()),
        DataType::UInt16 => Values::U16(array.as_primitive().clone()),
        DataType::UInt32 => Values::U32(array.as_primitive().clone()),
        DataType::UInt64 => Values::U64(array.as_primitive().clone()),
        DataType::Float16 => Values::F16(array.as_primitive().clone()),
        DataType::Float32 => Values::F32(array.as_primitive().clone()),
        DataType::Float64 => Values::F64(array.as_primitive().clone()),
        DataType::Decimal128(..) => Values::Decimal128(array.as_primitive::<Decimal128Type>().clone()),
        DataType::Decimal256(..) => Values::Decimal256(array.as_primitive::<Decimal256Type>().clone()),
        DataType::Utf8 => Values::Text(array.as_string().clone()),
        DataType::LargeUtf8 => Values::LargeText(array.as_string().clone()),
        DataType::Utf8View => Values::TextView(array.as_string_view().clone()),
        DataType::Timestamp(..) | DataType::Date32 | DataType::Date64 | DataType::Time32(_) | DataType::Time64(_) => {
            Values::Time(array.clone())
        }
        DataType::Struct(fields) => {
            let array = array.as_struct();
            let named = |(field, column): (&arrow_schema::FieldRef, &ArrayRef)| {
                (key(field.name()), field.name().clone(), Column::new(column))
            };
            Values::Struct(fields.iter().zip(array.columns()).map(named).collect())
        }
        DataType::List(_) => {
            let array = array.as_list::<i32>();
            let ends = array.offsets().windows(2).map(|pair| (pair[0] as usize, pair[1] as usize)).collect();
            Values::List(ends, list(array.values()))
        }
        DataType::LargeList(_) => {
            let array = array.as_list::<i64>();
            let ends = array.offsets().windows(2).map(|pair| (pair[0] as usize, pair[1] as usize)).collect();
            Values::List(ends, list(array.values()))
        }
        DataType::FixedSizeList(_, size) => {
            let size = usize::try_from(*size).unwrap_or(0);
            let array = array.as_fixed_size_list();
            Values::List((0..array.len()).map(|row| (row * size, (row + 1) * size)).collect(), list(array.values()))
        }
        DataType::Map(..) => {
            let array = array.as_map();
            let ends = array.offsets().windows(2).map(|pair| (pair[0] as usize, pair[1] as usize)).collect();
            Values::Map(ends, list(array.keys()), list(array.values()))
        }
        DataType::Dictionary(..) => {
            let array = array.as_any_dictionary();
            if array.values().is_empty() {
                return Values::Nothing;
            }
            Values::Dictionary(array.normalized_keys(), list(array.values()))
        }
        other => Values::Refused(format!("a value of type {}", short(other))),
    }
}

/// A type as users know it.
fn short(kind: &DataType) -> String {
    match kind {
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            "binary".into()
        }
        other => other.to_string().to_lowercase(),
    }
}

/// ISO 8601, as pandas and Python write it; an instant with a time zone in UTC.
fn time(array: &ArrayRef, row: usize) -> Result<String, Refusal> {
    use arrow_array::types as t;
    let ticks = |unit: &TimeUnit| match unit {
        TimeUnit::Second => array.as_primitive::<t::TimestampSecondType>().value(row),
        TimeUnit::Millisecond => array.as_primitive::<t::TimestampMillisecondType>().value(row),
        TimeUnit::Microsecond => array.as_primitive::<t::TimestampMicrosecondType>().value(row),
        TimeUnit::Nanosecond => array.as_primitive::<t::TimestampNanosecondType>().value(row),
    };
    let text = match array.data_type() {
        DataType::Timestamp(unit, zone) => {
            let at = match unit {
                TimeUnit::Second => temporal::timestamp_s_to_datetime(ticks(unit)),
                TimeUnit::Millisecond => temporal::timestamp_ms_to_datetime(ticks(unit)),
                TimeUnit::Microsecond => temporal::timestamp_us_to_datetime(ticks(unit)),
                TimeUnit::Nanosecond => temporal::timestamp_ns_to_datetime(ticks(unit)),
            };
            let zone = if zone.is_some() { "Z" } else { "" };
            at.map(|at| format!("{}{zone}", at.format("%Y-%m-%dT%H:%M:%S%.f")))
        }
        DataType::Date32 => temporal::date32_to_datetime(array.as_primitive::<Date32Type>().value(row))
            .map(|at| at.format("%Y-%m-%d").to_string()),
        DataType::Date64 => temporal::date64_to_datetime(array.as_primitive::<Date64Type>().value(row))
            .map(|at| at.format("%Y-%m-%d").to_string()),
        DataType::Time32(TimeUnit::Second) => {
            temporal::time32s_to_time(array.as_primitive::<t::Time32SecondType>().value(row)).map(|at| at.to_string())
        }
        DataType::Time32(_) => temporal::time32ms_to_time(array.as_primitive::<t::Time32MillisecondType>().value(row))
            .map(|at| at.to_string()),
        DataType::Time64(TimeUnit::Microsecond) => {
            temporal::time64us_to_time(array.as_primitive::<t::Time64MicrosecondType>().value(row))
                .map(|at| at.to_string())
        }
        DataType::Time64(_) => temporal::time64ns_to_time(array.as_primitive::<t::Time64NanosecondType>().value(row))
            .map(|at| at.to_string()),
        _ => None,
    };
    text.ok_or_else(|| Refusal::new("a time that no calendar holds".into(), "a time from the years -262143 to 262142"))
}
