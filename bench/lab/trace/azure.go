package trace

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// columns says where in a CSV line the three values stand.
type columns struct {
	at    [3]int // of when, prompt, output
	names [3]string
	unit  time.Duration // of a time that is a plain number
	sep   byte
	count int
	named bool // there was a header line
}

// azureHeader finds the columns. A first line that holds data already stands
// for Azure's own order.
func azureHeader(line []byte) (*columns, error) {
	c := &columns{names: azureNames, unit: time.Second, sep: ','}
	for _, sep := range []byte{',', '\t', ';'} {
		if bytes.IndexByte(line, sep) >= 0 {
			c.sep = sep
			break
		}
	}
	fields := splitCSV(line, c.sep)
	c.count = len(fields)
	if c.at = [3]int{0, 1, 2}; len(fields) >= 3 {
		if _, err := c.row(line); err == nil {
			return c, nil
		}
	}
	c.named, c.at = true, [3]int{-1, -1, -1}
	for i, f := range fields {
		which, unit, ok := meaning(f)
		if !ok {
			continue // a column of somebody else's
		}
		if c.at[which] >= 0 {
			return nil, fmt.Errorf("columns %d and %d of the header both name the same value: %q and %q", c.at[which]+1, i+1, fields[c.at[which]], f)
		}
		c.at[which], c.names[which] = i, f
		if unit > 0 {
			c.unit = unit
		}
	}
	for which, name := range azureNames {
		if c.at[which] < 0 {
			return nil, fmt.Errorf("no column %s, nor one of another name that says %s; call it %s (docs/traces.md has every name); a line of JSON "+
				"begins with {", name, says[which], natural[which])
		}
	}
	return c, nil
}

func (c *columns) row(line []byte) (row, error) {
	fields := splitCSV(line, c.sep)
	if len(fields) != c.count {
		return row{}, fmt.Errorf("%d columns instead of %d", len(fields), c.count)
	}
	at, err := clock(fields[c.at[when]], c.unit)
	if err != nil {
		return row{}, err
	}
	r := row{at: at}
	if r.req.Prompt, err = tokenField(c.names[prompt], fields[c.at[prompt]]); err != nil {
		return row{}, err
	}
	if r.req.Output, err = tokenField(c.names[output], fields[c.at[output]]); err != nil {
		return row{}, err
	}
	return r, nil
}

// splitCSV splits a line. Quotes may stand around a field, and keep what is in
// them together; a field never goes on in the next line.
func splitCSV(line []byte, sep byte) []string {
	if bytes.IndexByte(line, '"') >= 0 {
		r := csv.NewReader(bytes.NewReader(line))
		r.Comma, r.LazyQuotes, r.TrimLeadingSpace = rune(sep), true, sep != '\t'
		if fields, err := r.Read(); err == nil {
			for i := range fields {
				fields[i] = strings.TrimSpace(fields[i])
			}
			return fields
		}
	}
	fields := make([]string, 0, 4)
	for f := range bytes.SplitSeq(line, []byte{sep}) {
		fields = append(fields, string(bytes.TrimSpace(f)))
	}
	return fields
}

func tokenField(name, s string) (int, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		// pandas writes whole numbers as floats once a column had a gap
		f, ferr := strconv.ParseFloat(s, 64)
		if ferr != nil || f != float64(int64(f)) {
			return 0, fmt.Errorf("%s is %q, not a whole number", name, s)
		}
		n = int64(f)
	}
	return checkTokens(name, n)
}

// azureTimes are the layouts of Azure's two releases and of RFC 3339; Go reads
// any number of second decimals with each. Without a zone it is UTC.
var azureTimes = []string{"2006-01-02 15:04:05", "2006-01-02 15:04:05Z07:00", "2006-01-02T15:04:05", time.RFC3339}

// clock returns a date as Unix time, or a plain number in its unit.
func clock(s string, unit time.Duration) (time.Duration, error) {
	for _, layout := range azureTimes {
		t, err := time.Parse(layout, s)
		if err != nil {
			continue
		}
		if t.Before(firstTime) || t.After(lastTime) {
			return 0, fmt.Errorf("time %q is not between %d and %d", s, firstTime.Year(), lastTime.Year())
		}
		return time.Duration(t.UnixNano()), nil
	}
	if f, err := strconv.ParseFloat(s, 64); err == nil && f >= 0 && f <= maxSeconds*float64(time.Second/unit) {
		return time.Duration(f * float64(unit)), nil
	}
	return 0, fmt.Errorf("time %q is neither a date like 2023-11-16 18:15:46.6805900 nor a number of seconds; a column of milliseconds is "+
		"called timestamp_ms", s)
}

const maxSeconds = 8e9 // year 2223, as a Unix time

var (
	firstTime = time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(2223, 1, 1, 0, 0, 0, 0, time.UTC)
)
