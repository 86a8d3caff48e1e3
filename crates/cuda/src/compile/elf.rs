/// How many arguments a kernel takes, from the cubin's section `.nv.info.<kernel>`; `None` where that is not found. The
/// driver tells the size of each argument, but has an error as its only answer to "is there another".
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

/// The contents of a section of a 64-bit little-endian ELF file.
fn section<'a>(file: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let u16_at = |offset: usize| -> Option<usize> {
        Some(usize::from(u16::from_le_bytes(file.get(offset..offset + 2)?.try_into().ok()?)))
    };
    let u32_at = |offset: usize| -> Option<usize> {
        usize::try_from(u32::from_le_bytes(file.get(offset..offset + 4)?.try_into().ok()?)).ok()
    };
    let u64_at = |offset: usize| -> Option<usize> {
        usize::try_from(u64::from_le_bytes(file.get(offset..offset + 8)?.try_into().ok()?)).ok()
    };
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (headers, header_bytes) = (u64_at(0x28)?, u16_at(0x3a)?);
    let (count, names) = (u16_at(0x3c)?, u16_at(0x3e)?);
    let header = |index: usize| headers.checked_add(index.checked_mul(header_bytes)?);
    let contents = |index: usize| -> Option<&'a [u8]> {
        let header = header(index)?;
        let (start, bytes) = (u64_at(header.checked_add(0x18)?)?, u64_at(header.checked_add(0x20)?)?);
        file.get(start..start.checked_add(bytes)?)
    };
    let names = contents(names)?;
    (0..count).find_map(|index| {
        let from = names.get(u32_at(header(index)?)?..)?;
        let len = from.iter().position(|&byte| byte == 0)?;
        (&from[..len] == name.as_bytes()).then(|| contents(index))?
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
            file.truncate(6);
        }
    }
}
