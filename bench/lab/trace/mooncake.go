package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// mooncakeLine is one line of the file. Members of other releases (session,
// type) are passed over; the four we use must have their type. Members of other
// names are looked for where one of these is missing.
type mooncakeLine struct {
	Timestamp *float64 `json:"timestamp"` // ms; whole numbers in the release, fractions in others'
	Input     *int64   `json:"input_length"`
	Output    *int64   `json:"output_length"`
	HashIDs   []uint64 `json:"hash_ids"`
}

func mooncakeRow(line []byte) (row, error) {
	var m mooncakeLine
	dec := json.NewDecoder(bytes.NewReader(line))
	if err := dec.Decode(&m); err != nil {
		return row{}, fmt.Errorf("not a Mooncake record: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return row{}, errors.New("more than one record on the line")
	}
	switch {
	case m.Timestamp == nil || m.Input == nil || m.Output == nil:
		return namedRow(line)
	case *m.Timestamp < 0 || *m.Timestamp > maxSeconds*1000:
		return row{}, fmt.Errorf("timestamp is %v; it counts milliseconds from 0", *m.Timestamp)
	}
	r := row{at: time.Duration(*m.Timestamp * float64(time.Millisecond))}
	var err error
	if r.req.Prompt, err = checkTokens("input_length", *m.Input); err != nil {
		return row{}, err
	}
	if r.req.Output, err = checkTokens("output_length", *m.Output); err != nil {
		return row{}, err
	}
	r.req.HashIDs = m.HashIDs
	return r, nil
}

// namedRow reads a line whose members have other names than Mooncake's, such as one of evenkeel's
// own request log: {"arrival": "2026-01-02T15:04:05Z", "prompt_tokens": 9, "output_tokens": 3}.
func namedRow(line []byte) (row, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(line, &members); err != nil {
		return row{}, fmt.Errorf("not a record: %w", err)
	}
	var found [3]string
	unit := time.Millisecond
	for _, name := range slices.Sorted(maps.Keys(members)) {
		which, u, ok := meaning(name)
		if !ok {
			continue
		}
		if found[which] != "" {
			return row{}, fmt.Errorf("%q and %q both name the same value", found[which], name)
		}
		if found[which] = name; u > 0 {
			unit = u
		}
	}
	for which, name := range found {
		if name == "" {
			return row{}, fmt.Errorf("no %s, nor a member of another name that says %s (docs/traces.md has every name)", natural[which], says[which])
		}
	}
	value := func(which int) string { return strings.Trim(string(members[found[which]]), `"`) }
	at, err := clock(value(when), unit)
	if err != nil {
		return row{}, fmt.Errorf("%s: %w", found[when], err)
	}
	r := row{at: at}
	if r.req.Prompt, err = tokenField(found[prompt], value(prompt)); err != nil {
		return row{}, err
	}
	r.req.Output, err = tokenField(found[output], value(output))
	return r, err
}
