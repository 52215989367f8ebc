package openai

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
)

// Values come from a scanned body, so their first byte shows their type.

func isNull(v json.RawMessage) bool    { return v[0] == 'n' }
func isString(v json.RawMessage) bool  { return v[0] == '"' }
func isArray(v json.RawMessage) bool   { return v[0] == '[' }
func isObject(v json.RawMessage) bool  { return v[0] == '{' }
func isBoolean(v json.RawMessage) bool { return v[0] == 't' || v[0] == 'f' }
func isNumber(v json.RawMessage) bool  { return v[0] == '-' || v[0] >= '0' && v[0] <= '9' }

// isInteger is true for 1.0 and 1e0, as in JSON Schema.
func isInteger(v json.RawMessage) bool {
	_, ok := digitsOf(v)
	return ok
}

// hasOnlyDigits allows a minus.
func hasOnlyDigits(v json.RawMessage) bool {
	for i, c := range v {
		isSign := i == 0 && c == '-'
		if (c < '0' || c > '9') && !isSign {
			return false
		}
	}
	return true
}

// digitsOf writes a whole number such as 1.0, 1e3 or -20 with digits only. If v does not fit into
// 64 bits, the result does not either, but it may lack some zeros.
//
// It takes v for digits * 10^zeros, where digits are those on both sides of the decimal point:
// 1.25e4 is 125 * 10^2.
func digitsOf(v json.RawMessage) (text string, ok bool) {
	if hasOnlyDigits(v) {
		return string(v), true
	}
	if !isNumber(v) {
		return "", false
	}
	const maxZeros = 20 // to append; with so many, the number is beyond 64 bits
	sign, unsigned := "", string(v)
	if unsigned[0] == '-' {
		sign, unsigned = "-", unsigned[1:]
	}
	mantissa, exponentText, exponent := unsigned, "", 0
	if at := strings.IndexAny(unsigned, "eE"); at >= 0 {
		mantissa, exponentText = unsigned[:at], unsigned[at+1:]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	fraction = strings.TrimRight(fraction, "0")
	digits := strings.TrimLeft(whole+fraction, "0")
	if digits == "" { // whatever the exponent
		return "0", true
	}
	if exponentText != "" {
		var err error
		if exponent, err = strconv.Atoi(exponentText); err != nil { // far outside of 64 bits
			exponent = math.MaxInt32
			if exponentText[0] == '-' {
				exponent = math.MinInt32
			}
		}
	}
	zeros := exponent - len(fraction) // to append; below 0: the digits behind the decimal point
	if zeros < 0 {                    // these must all be 0
		wholeDigits := len(digits) + zeros // below 1: the number is between -1 and 1
		if wholeDigits < 1 || strings.Trim(digits[wholeDigits:], "0") != "" {
			return "", false
		}
		return sign + digits[:wholeDigits], true
	}
	return sign + digits + strings.Repeat("0", min(zeros, maxZeros)), true
}

func isDigits(s string) bool {
	for _, c := range s {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}

func parseBoolean(v json.RawMessage) (on, ok bool) { return v[0] == 't', isBoolean(v) }

func parseInteger(v json.RawMessage, lo, hi int64) (n int64, ok bool) {
	text, ok := digitsOf(v)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil && n >= lo && n <= hi
}

// Not every engine accepts 1.0 or 1e0 as an integer, so v is overwritten with the digits of n and
// blanks. ok is false if v is too short.
func overwriteWithDigits(v json.RawMessage, n int64) (ok bool) {
	if hasOnlyDigits(v) {
		return true
	}
	text := strconv.AppendInt(make([]byte, 0, 20), n, 10)
	if len(text) > len(v) {
		return false
	}
	for i := copy(v, text); i < len(v); i++ {
		v[i] = ' '
	}
	return true
}

func isNumberIn(v json.RawMessage, lo, hi float64) bool {
	if !isNumber(v) {
		return false
	}
	f, err := strconv.ParseFloat(string(v), 64)
	return err == nil && f >= lo && f <= hi
}

// want describes a right value, and hasType says whether v has the right type.
func wrongValue(param string, v json.RawMessage, hasType func(json.RawMessage) bool, want string) *Error {
	code := CodeInvalidType
	if hasType(v) {
		code = CodeInvalidValue
	}
	return badRequest(code, param, "%q is %s; it must be %s", param, shorten(string(v)), want)
}

// shorten cuts only at the beginning of a character.
func shorten(s string) string {
	const maxBytes = 60
	if len(s) <= maxBytes {
		return s
	}
	end := 0
	for i := range s {
		end = i
		if i >= maxBytes {
			break
		}
	}
	return s[:end] + "..."
}
