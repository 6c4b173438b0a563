"""Names the format of a file that isn't supported, so that errors can say what it is."""

import re

_NAMES = {
    rb"II\*\x00|MM\x00\*|II\+\x00|MM\x00\+": "a TIFF image",
    rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)": "a HEIC image",
    rb"\xff\x0a|\x00\x00\x00\x0cJXL ": "a JPEG XL image",
    rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51": "a JPEG 2000 image",
    rb"8BPS": "a Photoshop image",
    rb"\x00\x00[\x01\x02]\x00[^\x00]\x00": "an icon",
    rb"P[1-7fF][ \t\r\n#]": "a PNM image",
    rb"\x0a[\x00-\x05]\x01[\x01-\x08]": "a PCX image",
    rb"#\?R": "an HDR image",
    rb"v/1\x01": "an OpenEXR image",
    rb"DDS ": "a DDS image",
    rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE svg[^>]*>\s*)?<svg": "an SVG image",
    rb"\s*<(!DOCTYPE html|html)": "an HTML page",
    rb"%PDF-": "a PDF document",
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM|RIFF....WEBP|....ftypavi[fs]": "an image",
    rb"RIFF....AVI ": "an AVI video",
    rb"FLV\x01": "an FLV video",
    rb"\x47.{187}\x47|\x00\x00..\x47.{191}\x47": "an MPEG transport stream",
    rb"\x00\x00\x01[\xba\xb3]": "an MPEG video",
    rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "a Windows Media file",
    rb"OggS.{24,400}?(\x80theora|BBCD)": "an Ogg video",
    rb"\.RMF": "a RealMedia file",
    rb"\x06\x0e\x2b\x34": "an MXF video",
    rb"DKIF": "an IVF video",
    rb"YUV4MPEG2": "a Y4M video",
    rb"\x1a\x45\xdf\xa3": "a WebM or Matroska file",
    rb"....(ftyp|moov|mdat|styp|wide)": "an MP4 file",
    rb"RIFF....WAVE|fLaC|OggS|ID3|FORM....AIF[FC]": "an audio file",
}
_KNOWN = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE if "<" in str(pattern) else re.DOTALL), name)
    for pattern, name in _NAMES.items()
]
_LOOKED_AT = 1024


def described(data: bytes) -> str:
    """Return what a file is, such as ``": it is a TIFF image"``; empty if its format isn't known."""
    head = bytes(data[:_LOOKED_AT])
    name = next((name for pattern, name in _KNOWN if pattern.match(head)), None)
    return f": it is {name}" if name else ""
