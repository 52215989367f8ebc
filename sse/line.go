package sse

import "bytes"

// dataLine returns the value of a data line: the bytes after the colon and one optional space. ok
// is false for another line.
func dataLine(line []byte) (value []byte, ok bool) {
	if !bytes.HasPrefix(line, []byte("data")) {
		return nil, false
	}
	value = line[len("data"):]
	if len(value) == 0 {
		return value, true // a field name without a colon has an empty value
	}
	if value[0] != ':' { // the name of the field only begins with data
		return nil, false
	}
	value = value[1:]
	if len(value) > 0 && value[0] == ' ' {
		value = value[1:]
	}
	return value, true
}

// cutLine splits off the first line of a complete event. The line end between line and rest, an LF,
// CRLF or CR, is in neither of them.
func cutLine(b []byte) (line, rest []byte) {
	i := bytes.IndexAny(b, "\r\n")
	switch {
	case i < 0:
		return b, nil
	case b[i] == '\r' && i+1 < len(b) && b[i+1] == '\n':
		return b[:i], b[i+2:]
	default:
		return b[:i], b[i+1:]
	}
}

// appendDataLines appends the values of an event's data lines, joined by \n. raw is the whole
// event.
func appendDataLines(dst, raw []byte) []byte {
	for first := true; len(raw) > 0; {
		var line []byte
		line, raw = cutLine(raw)
		value, ok := dataLine(line)
		if !ok {
			continue
		}
		if !first {
			dst = append(dst, '\n')
		}
		dst, first = append(dst, value...), false
	}
	return dst
}

// appendOtherLines appends an event's lines that are neither data nor blank, each with an LF.
func appendOtherLines(dst, raw []byte) []byte {
	for len(raw) > 0 {
		var line []byte
		line, raw = cutLine(raw)
		if _, isData := dataLine(line); !isData && len(line) > 0 {
			dst = append(append(dst, line...), '\n')
		}
	}
	return dst
}

// AppendComments appends the comments of an event without data, each with an LF. The rest of it is
// left out, above all the blank line: openai-go before 3.43 takes it for the end of an event, and
// fails because there is no data.
func AppendComments(dst []byte, e Event) []byte {
	for raw := e.Raw; len(raw) > 0; {
		var line []byte
		line, raw = cutLine(raw)
		if len(line) > 0 && line[0] == ':' {
			dst = append(append(dst, line...), '\n')
		}
	}
	return dst
}

// isDone says whether the data of an event is [DONE], with white space or without.
func isDone(data []byte) bool {
	const tooLong = 16 // in bytes; no engine sends so much white space, and long data need not be searched for it
	return len(data) < tooLong && string(bytes.TrimSpace(data)) == "[DONE]"
}
