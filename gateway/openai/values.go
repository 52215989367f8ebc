package openai

import (
	"encoding/json"
	"strconv"
)

// Values come from a scanned body, so their first byte tells their type.

func isString(v json.RawMessage) bool  { return v[0] == '"' }
func isArray(v json.RawMessage) bool   { return v[0] == '[' }
func isObject(v json.RawMessage) bool  { return v[0] == '{' }
func isBoolean(v json.RawMessage) bool { return v[0] == 't' || v[0] == 'f' }
func isNumber(v json.RawMessage) bool  { return v[0] == '-' || v[0] >= '0' && v[0] <= '9' }

// isInteger: 1.0 and 1e0 are not, an engine may read them either way.
func isInteger(v json.RawMessage) bool {
	for i, c := range v {
		if (c < '0' || c > '9') && (i > 0 || c != '-') {
			return false
		}
	}
	return true
}

func isDigits(s string) bool {
	for _, c := range s {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}

func boolean(v json.RawMessage) (on, ok bool) { return v[0] == 't', isBoolean(v) }

func integer(v json.RawMessage, lo, hi int64) (int64, bool) {
	if !isInteger(v) {
		return 0, false
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	return n, err == nil && n >= lo && n <= hi
}

func number(v json.RawMessage, lo, hi float64) bool {
	if !isNumber(v) {
		return false
	}
	f, err := strconv.ParseFloat(string(v), 64)
	return err == nil && f >= lo && f <= hi
}

// wrong says that v is of another type than it must be, or out of range.
func wrong(param string, v json.RawMessage, hasType func(json.RawMessage) bool, want string) *Error {
	code := CodeInvalidType
	if hasType(v) {
		code = CodeInvalidValue
	}
	return bad(code, param, "%q is %s; it must be %s", param, shorten(string(v)), want)
}

// shorten is a value as an error message shows it.
func shorten(s string) string {
	const most = 60
	if len(s) <= most {
		return s
	}
	n := 0
	for i := range s {
		if n = i; i >= most {
			break
		}
	}
	return s[:n] + "..."
}
