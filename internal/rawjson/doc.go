// Package rawjson scans JSON by byte positions, without decoding it. Scan
// validates a text in one pass. Object, Array and what is built on them walk
// a text and trust what lies between its structure: they find where members and
// values start and end. Nothing here allocates but errors and keys with escapes.
package rawjson
