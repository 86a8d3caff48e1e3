//! Masks as JSON: strict reading whose errors name the slice and the field, and writing, one slice a line.

use std::fmt::{self, Write};
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::mask::MAX_SEQLEN;
use crate::{AttnSlice, Mask, MaskError, MaskType, Range};

/// What the field `schema` of a mask's document says, where there is one.
pub const MASK_SCHEMA: &str = "counterpoint.mask/1";

impl Mask {
    /// Reads `{"seqlen_q": 1024, "seqlen_k": 1024, "slices": [{"q": [0, 512], "k": [0, 1024], "type": "causal"}, …]}`.
    ///
    /// # Errors
    /// Text that is not JSON, or not of this form (unknown, missing or doubled fields, wrong types, numbers that are
    /// negative, fractional or too large), with the place, line and column; a `schema` other than [`MASK_SCHEMA`]; or a mask that
    /// [`Mask::new`] refuses.
    pub fn from_json(text: &str) -> Result<Self, MaskError> {
        // Some editors write a byte order mark in front.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let document: Object<Document> =
            serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
                let path = error.path().to_string();
                // `.` is the document itself, `?` a place with no name; neither says anything to the user.
                let path = if path == "." || path.contains('?') { String::new() } else { path };
                describe(path, &error.into_inner())
            })?;
        deserializer.end().map_err(|error| describe(String::new(), &error))?;
        document.0.try_into()
    }

    /// The mask in the form that [`Mask::from_json`] reads, one slice a line.
    pub fn to_json(&self) -> String {
        let mut text = format!(
            "{{\n  \"seqlen_q\": {},\n  \"seqlen_k\": {},\n  \"slices\": [",
            self.seqlen_q(),
            self.seqlen_k()
        );
        for (index, AttnSlice { q_range: q, k_range: k, mask_type }) in self.slices().iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "{separator}\n    {{\"q\": [{}, {}], \"k\": [{}, {}], \"type\": \"{mask_type}\"}}",
                q.start, q.end, k.start, k.end
            );
        }
        text.push_str(if self.slices().is_empty() { "]\n}\n" } else { "\n  ]\n}\n" });
        text
    }
}

impl Serialize for Mask {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Document {
            seqlen_q: Tokens(self.seqlen_q()),
            seqlen_k: Tokens(self.seqlen_k()),
            slices: List(self.slices().iter().map(|slice| Object(Entry::from(slice))).collect()),
            schema: FileSchema,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Mask {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Object::<Document>::deserialize(deserializer)?.0.try_into().map_err(Error::custom)
    }
}

/// A mask as it stands in a file, not yet validated.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    seqlen_q: Tokens,
    seqlen_k: Tokens,
    slices: List<Object<Entry>>,
    #[serde(default, skip_serializing)]
    #[expect(dead_code, reason = "that it can be read is all that it says")]
    schema: FileSchema,
}

/// A slice as it stands in a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    q: Bounds,
    k: Bounds,
    #[serde(rename = "type")]
    mask_type: Kind,
}

/// A value written as a JSON object. Serde's derive alone would take a list of the fields' values as well.
#[derive(Serialize)]
#[serde(transparent)]
struct Object<T>(T);

trait Fields {
    /// Names the fields in messages.
    const FIELDS: &str;
}

impl Fields for Document {
    const FIELDS: &str = "seqlen_q, seqlen_k and slices";
}

impl Fields for Entry {
    const FIELDS: &str = "q, k and type";
}

/// [`MASK_SCHEMA`], or nothing.
#[derive(Default)]
struct FileSchema;

/// A number of tokens, or the index of one.
struct Tokens(usize);

/// `[start, end]`.
struct Bounds(Range);

/// A slice's type. The parser calls a number in place of an enum's name a syntax error, so the name is read here.
struct Kind(MaskType);

/// A list. Serde's own names it a sequence in messages.
#[derive(Serialize)]
#[serde(transparent)]
struct List<T>(Vec<T>);

impl TryFrom<Document> for Mask {
    type Error = MaskError;

    fn try_from(document: Document) -> Result<Self, MaskError> {
        let slices = document.slices.0.iter().map(|Object(entry)| AttnSlice {
            q_range: entry.q.0,
            k_range: entry.k.0,
            mask_type: entry.mask_type.0,
        });
        Mask::new(document.seqlen_q.0, document.seqlen_k.0, slices.collect())
    }
}

impl From<&AttnSlice> for Entry {
    fn from(slice: &AttnSlice) -> Self {
        Self { q: Bounds(slice.q_range), k: Bounds(slice.k_range), mask_type: Kind(slice.mask_type) }
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0 as u64)
    }
}

impl Serialize for Bounds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        [self.0.start, self.0.end].serialize(serializer)
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name())
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_u64(TokensVisitor)
    }
}

impl<'de> Deserialize<'de> for FileSchema {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(SchemaVisitor)
    }
}

impl<'de> Deserialize<'de> for Bounds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(BoundsVisitor)
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(KindVisitor)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor(PhantomData)).map(List)
    }
}

impl<'de, T: Deserialize<'de> + Fields> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData)).map(Object)
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Fields> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with {}", T::FIELDS)
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(fields))
    }
}

struct TokensVisitor;

impl Visitor<'_> for TokensVisitor {
    type Value = Tokens;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number from 0 to {MAX_SEQLEN}")
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Tokens, E> {
        match usize::try_from(value) {
            Ok(tokens) if tokens <= MAX_SEQLEN => Ok(Tokens(tokens)),
            _ => Err(E::invalid_value(Unexpected::Unsigned(value), &self)),
        }
    }

    /// `-0` is a whole number, but the parser makes a float of it.
    fn visit_f64<E: Error>(self, value: f64) -> Result<Tokens, E> {
        match value.to_bits() == (-0.0_f64).to_bits() {
            true => Ok(Tokens(0)),
            false => Err(E::invalid_type(Unexpected::Float(value), &self)),
        }
    }
}

struct SchemaVisitor;

impl Visitor<'_> for SchemaVisitor {
    type Value = FileSchema;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK_SCHEMA)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<FileSchema, E> {
        match name == MASK_SCHEMA {
            true => Ok(FileSchema),
            false => Err(E::invalid_value(Unexpected::Str(name), &self)),
        }
    }
}

struct KindVisitor;

impl Visitor<'_> for KindVisitor {
    type Value = Kind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one of full, causal, inv_causal, bi_causal")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Kind, E> {
        let mask_type = MaskType::deserialize(name.into_deserializer());
        mask_type
            .map(Kind)
            .map_err(|_: serde::de::value::Error| E::invalid_value(Unexpected::Str(name), &self))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(list)
    }
}

struct BoundsVisitor;

impl<'de> Visitor<'de> for BoundsVisitor {
    type Value = Bounds;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("two numbers [start, end]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Bounds, A::Error> {
        let wrong_count = |count| Error::invalid_length(count, &self);
        let start = items.next_element::<Tokens>()?.ok_or_else(|| wrong_count(0))?;
        let end = items.next_element::<Tokens>()?.ok_or_else(|| wrong_count(1))?;
        let mut count = 2;
        while items.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        // Reversed ranges pass here: `Mask::new` refuses them, with the slice's index.
        if count == 2 { Ok(Bounds(Range { start: start.0, end: end.0 })) } else { Err(wrong_count(count)) }
    }
}

/// The parser's message in the words of someone who edits a mask file.
fn describe(path: String, error: &serde_json::Error) -> MaskError {
    let (line, column) = (error.line(), error.column());
    let message = error.to_string();
    let message = message.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&message);
    let problem = if error.is_eof() {
        "the JSON ends too early; something is not closed".to_owned()
    } else if error.is_syntax() {
        match message {
            // It is JSON, and no number of tokens.
            "number out of range" => {
                format!("this number is too large; at most {MAX_SEQLEN} tokens are supported")
            }
            _ => format!("this is not JSON: {message}"),
        }
    } else {
        reword(message)
    };
    MaskError::Json { path: one_line(&path), problem: one_line(&problem), line, column }
}

/// What stands in the file may hold line breaks, or a megabyte of text in place of a number.
fn one_line(text: &str) -> String {
    const LONGEST: usize = 160;
    let mut line = String::new();
    for (index, character) in text.chars().enumerate() {
        if index == LONGEST {
            line.push('…');
            break;
        }
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// Turns `invalid type: A, expected B` round, and names the found value as JSON does.
fn reword(message: &str) -> String {
    let Some((found, expected)) = ["invalid type: ", "invalid value: ", "invalid length "]
        .iter()
        .find_map(|prefix| message.strip_prefix(prefix)?.split_once(", expected "))
    else {
        return message.to_owned();
    };
    let literal = ["integer", "floating point", "boolean", "string"]
        .iter()
        .find_map(|kind| found.strip_prefix(kind)?.strip_prefix(' '))
        .map(|literal| literal.trim_matches('`'));
    let found = match found {
        "map" => "an object",
        "sequence" => "a list",
        "1" if message.starts_with("invalid length") => "1 number",
        _ if message.starts_with("invalid length") => {
            return format!("expected {expected}, got {found} numbers");
        }
        _ => literal.unwrap_or(found),
    };
    format!("expected {expected}, got {found}")
}
