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

// isInteger says whether a value is a whole number. 1.0 and 1e0 are whole numbers, as in JSON Schema.
func isInteger(v json.RawMessage) bool {
	_, ok := digitsOf(v)
	return ok
}

// hasOnlyDigits says whether a number is written with digits alone, possibly after a minus.
func hasOnlyDigits(v json.RawMessage) bool {
	for i, c := range v {
		isSign := i == 0 && c == '-'
		if (c < '0' || c > '9') && !isSign {
			return false
		}
	}
	return true
}

// digitsOf writes a whole number such as 1.0, 1e3 or -20 with digits only. ok is false if v is not a whole number. If v does not fit into
// 64 bits, the result does not either, but it may lack some zeros.
//
// It takes v for digits * 10^zeros, where digits are those on both sides of the decimal point: 1.25e4 is 125 * 10^2.
func digitsOf(v json.RawMessage) (text string, ok bool) {
	if hasOnlyDigits(v) {
		return string(v), true
	}
	if !isNumber(v) {
		return "", false
	}
	const maxZeros = 20 // zeros to append at most; with so many, the number is beyond 64 bits
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
	if digits == "" { // the number is 0, whatever its exponent
		return "0", true
	}
	if exponentText != "" {
		var err error
		if exponent, err = strconv.Atoi(exponentText); err != nil { // the exponent is far outside of 64 bits
			exponent = math.MaxInt32
			if exponentText[0] == '-' {
				exponent = math.MinInt32
			}
		}
	}
	zeros := exponent - len(fraction) // zeros to append to digits; below 0: the number of digits behind the decimal point
	if zeros < 0 {                    // the digits behind the decimal point must all be 0
		wholeDigits := len(digits) + zeros // how many digits stand before the decimal point; below 1: the number is between -1 and 1
		if wholeDigits < 1 || strings.Trim(digits[wholeDigits:], "0") != "" {
			return "", false
		}
		return sign + digits[:wholeDigits], true
	}
	return sign + digits + strings.Repeat("0", min(zeros, maxZeros)), true
}

// isDigits says whether a text is not empty and has digits only.
func isDigits(s string) bool {
	for _, c := range s {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}

// parseBoolean returns the value of v, and whether v is a boolean.
func parseBoolean(v json.RawMessage) (on, ok bool) { return v[0] == 't', isBoolean(v) }

// parseInteger returns the value of v, and whether v is a whole number from lo to hi.
func parseInteger(v json.RawMessage, lo, hi int64) (n int64, ok bool) {
	text, ok := digitsOf(v)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil && n >= lo && n <= hi
}

// overwriteWithDigits overwrites v, a text of the whole number n, with the digits of n and blanks, because not every engine accepts 1.0 or
// 1e0 as an integer. ok is false if the digits need more room than v has.
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

// isNumberIn says whether v is a number from lo to hi.
func isNumberIn(v json.RawMessage, lo, hi float64) bool {
	if !isNumber(v) {
		return false
	}
	f, err := strconv.ParseFloat(string(v), 64)
	return err == nil && f >= lo && f <= hi
}

// wrongValue returns the refusal of a value of a wrong type (hasType is false) or out of range. want describes a right value.
func wrongValue(param string, v json.RawMessage, hasType func(json.RawMessage) bool, want string) *Error {
	code := CodeInvalidType
	if hasType(v) {
		code = CodeInvalidValue
	}
	return badRequest(code, param, "%q is %s; it must be %s", param, shorten(string(v)), want)
}

// shorten cuts a value to about 60 bytes for an error message. It cuts only at the beginning of a character, so that the text stays valid.
func shorten(s string) string {
	const maxBytes = 60
	if len(s) <= maxBytes {
		return s
	}
	end := 0
	for i := range s { // i is where a character begins
		end = i
		if i >= maxBytes {
			break
		}
	}
	return s[:end] + "..."
}
