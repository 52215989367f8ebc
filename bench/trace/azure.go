package trace

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// columns says where in a CSV line the three values stand.
type columns struct {
	at, prompt, output int
	count              int
	named              bool // there was a header line
}

// aliases are the header names in use, lower case, without '_', '-' and space.
var aliases = map[string]int{
	"timestamp": 0, "arrivaltime": 0, "arrivedat": 0, "time": 0,
	"contexttokens": 1, "prompttokens": 1, "inputtokens": 1, "inputlength": 1, "numprefilltokens": 1, "requesttokens": 1,
	"generatedtokens": 2, "outputtokens": 2, "completiontokens": 2, "outputlength": 2, "numdecodetokens": 2, "responsetokens": 2,
}

// azureHeader finds the columns. A first line that holds data already stands
// for Azure's own order.
func azureHeader(line []byte) (*columns, error) {
	fields := splitCSV(line)
	if asData := (&columns{at: 0, prompt: 1, output: 2, count: len(fields)}); len(fields) >= 3 {
		if _, err := asData.row(line); err == nil {
			return asData, nil
		}
	}
	found := [3]int{-1, -1, -1}
	for i, f := range fields {
		which, ok := aliases[strings.NewReplacer("_", "", "-", "", " ", "").Replace(strings.ToLower(f))]
		if !ok {
			continue // a column of somebody else's
		}
		if found[which] >= 0 {
			return nil, fmt.Errorf("columns %d and %d of the header both name the same value: %q and %q", found[which]+1, i+1, fields[found[which]], f)
		}
		found[which] = i
	}
	for which, name := range [3]string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"} {
		if found[which] < 0 {
			return nil, fmt.Errorf("no column %s; the header of an Azure trace is TIMESTAMP,ContextTokens,GeneratedTokens, and a line of a Mooncake trace begins with {", name)
		}
	}
	return &columns{at: found[0], prompt: found[1], output: found[2], count: len(fields), named: true}, nil
}

func (c *columns) row(line []byte) (row, error) {
	fields := splitCSV(line)
	if len(fields) != c.count {
		return row{}, fmt.Errorf("%d columns instead of %d", len(fields), c.count)
	}
	at, err := azureTime(fields[c.at])
	if err != nil {
		return row{}, err
	}
	r := row{at: at}
	if r.req.Prompt, err = tokenField("ContextTokens", fields[c.prompt]); err != nil {
		return row{}, err
	}
	if r.req.Output, err = tokenField("GeneratedTokens", fields[c.output]); err != nil {
		return row{}, err
	}
	return r, nil
}

// splitCSV splits a line of times and numbers: quotes may stand around a
// field, commas and quotes never in it.
func splitCSV(line []byte) []string {
	fields := make([]string, 0, 4)
	for f := range bytes.SplitSeq(line, []byte{','}) {
		f = bytes.TrimSpace(f)
		if len(f) >= 2 && f[0] == '"' && f[len(f)-1] == '"' {
			f = f[1 : len(f)-1]
		}
		fields = append(fields, string(f))
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

// azureTime returns a date as Unix time, or a plain number as seconds.
func azureTime(s string) (time.Duration, error) {
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
	if f, err := strconv.ParseFloat(s, 64); err == nil && f >= 0 && f <= maxSeconds {
		return time.Duration(f * float64(time.Second)), nil
	}
	return 0, fmt.Errorf("time %q is neither a date like 2023-11-16 18:15:46.6805900 nor a number of seconds", s)
}

const maxSeconds = 8e9 // year 2223, as a Unix time

var (
	firstTime = time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(2223, 1, 1, 0, 0, 0, 0, time.UTC)
)
