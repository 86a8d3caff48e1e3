//! What a cubin says of itself: how many arguments its kernel takes, and its `wgmma` and `mma.sync` instructions.

/// How many arguments a kernel takes, from the cubin's section `.nv.info.<kernel>`; `None` where that is not found. The
/// driver gives the size of each argument, but has an error as its only answer to "is there another".
pub(crate) fn count_arguments(cubin: &[u8], kernel: &str) -> Option<usize> {
    const ARGUMENT: u8 = 0x17;
    const WITH_PAYLOAD: u8 = 4;
    let info = section(cubin, &format!(".nv.info.{kernel}"))?;
    let (mut count, mut rest) = (0, info);
    // A list of attributes: format, kind, and two bytes that are a value or the size of what follows.
    while let [format, kind, low, high, ..] = *rest {
        let size = if format == WITH_PAYLOAD { usize::from(u16::from_le_bytes([low, high])) } else { 0 };
        count += usize::from(kind == ARGUMENT);
        rest = rest.get(4 + size..)?;
    }
    Some(count)
}

/// Matrix instructions in a cubin's machine code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatrixInstructions {
    /// wgmma.
    pub hgmma: u32,
    /// mma.sync.
    pub hmma: u32,
}

/// Counts them. An instruction has 16 bytes and its operation in the lowest 9 bits; the next 3 say where operands come from.
/// That is how `nvdisasm` prints the code of compute capabilities 8.x and 9.x, and a test compares with it.
pub fn count_matrix_instructions(cubin: &[u8]) -> MatrixInstructions {
    const HGMMA: u16 = 0x1f0;
    const HMMA: u16 = 0x03c;
    let code = sections(cubin).filter(|(name, _)| name.starts_with(b".text.")).map(|(_, contents)| contents);
    let operations = code
        .flat_map(|code| code.chunks_exact(16))
        .map(|instruction| u16::from_le_bytes([instruction[0], instruction[1]]) & 0x1ff);
    let mut counts = MatrixInstructions::default();
    for operation in operations {
        counts.hgmma += u32::from(operation == HGMMA);
        counts.hmma += u32::from(operation == HMMA);
    }
    counts
}

fn section<'a>(file: &'a [u8], name: &str) -> Option<&'a [u8]> {
    sections(file).find(|(found, _)| *found == name.as_bytes()).map(|(_, contents)| contents)
}

/// Name and contents of the sections of a 64-bit little-endian ELF file, as far as they lie inside of it.
fn sections(file: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let u16_at = |offset: usize| -> Option<usize> {
        Some(usize::from(u16::from_le_bytes(file.get(offset..)?.first_chunk().copied()?)))
    };
    let u32_at = |offset: usize| -> Option<usize> {
        usize::try_from(u32::from_le_bytes(file.get(offset..)?.first_chunk().copied()?)).ok()
    };
    let u64_at = |offset: usize| -> Option<usize> {
        usize::try_from(u64::from_le_bytes(file.get(offset..)?.first_chunk().copied()?)).ok()
    };
    let is_elf = file.starts_with(b"\x7fELF\x02\x01");
    let header =
        move |index: usize| -> Option<usize> { u64_at(0x28)?.checked_add(index.checked_mul(u16_at(0x3a)?)?) };
    let contents = move |index: usize| -> Option<&[u8]> {
        let header = header(index)?;
        let (start, bytes) = (u64_at(header.checked_add(0x18)?)?, u64_at(header.checked_add(0x20)?)?);
        file.get(start..start.checked_add(bytes)?)
    };
    let count = if is_elf { u16_at(0x3c).unwrap_or(0) } else { 0 };
    (0..count).filter_map(move |index| {
        let from = contents(u16_at(0x3e)?)?.get(u32_at(header(index)?)?..)?;
        let name = from.split(|&byte| byte == 0).next()?;
        Some((name, contents(index)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_counted() {
        for arch in [crate::Arch::SM_80, crate::Arch::SM_90A] {
            for (count, arguments) in [(0, ""), (1, "int a"), (4, "float* a, char b, double c, int d")] {
                let text = format!("extern \"C\" __global__ void f({arguments}) {{}}");
                match crate::compile(&crate::KernelSource::new("f", arch).line(text)) {
                    Ok(cubin) => {
                        assert_eq!(count_arguments(&cubin.image, "f"), Some(count));
                        assert_eq!(count_arguments(&cubin.image, "g"), None);
                    }
                    Err(error) => {
                        assert!(error.is_missing() && std::env::var_os("CI").is_none(), "{error}");
                        eprintln!("SKIPPED, which CI would not accept: {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn garbage_is_not_found() {
        assert_eq!(count_arguments(b"", "f"), None);
        let mut file = b"\x7fELF\x02\x01".to_vec();
        for byte in [0x00, 0x01, 0x7f, 0xff] {
            file.resize(300, byte);
            assert_eq!(count_arguments(&file, "f"), None);
            assert_eq!(count_matrix_instructions(&file), MatrixInstructions::default());
            file.truncate(6);
        }
    }
}
