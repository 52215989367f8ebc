// Package rawjson finds where the members and values of a JSON text start and end, without decoding
// it. Scan validates a text in one pass. Object, Array and the functions that use them do not
// validate: they check only brackets, commas, colons and quotes. The package allocates only for
// errors and for keys with escapes.
package rawjson
