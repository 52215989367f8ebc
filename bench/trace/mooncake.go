package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// mooncakeLine is one line of the file. Members of other releases (session,
// type) are passed over; the four we use must have their type.
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
	case m.Timestamp == nil:
		return row{}, errors.New("no timestamp (milliseconds)")
	case m.Input == nil:
		return row{}, errors.New("no input_length")
	case m.Output == nil:
		return row{}, errors.New("no output_length")
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
