package trace

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
	"unicode/utf8"
)

// Format names a file format, in the words of the command line.
type Format string

// The formats. The zero Format is Auto.
const (
	Auto          Format = "auto"     // by content: a line that begins with { is JSON
	AzureCSV      Format = "azure"    // columns of any names that are known, as Azure's and BurstGPT's
	MooncakeJSONL Format = "mooncake" // a JSON object a line, as Mooncake's and the request log
)

// Options of Read and Parse.
type Options struct {
	Format Format // default Auto
	Name   string // what errors call the input (Read: the path)
	Max    int    // stop after so many requests; 0: read all
}

const (
	maxLine   = 16 << 20 // a Mooncake line of 1M tokens is about 20 KB
	maxTokens = 1 << 30  // sums of a whole trace stay far from overflow

	oldestUnix = 1e9 * time.Second // a number below is an offset, from 2001 on it is a date
)

// Read reads a trace file, gzipped or not.
func Read(path string, opt Options) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	opt.Name = path
	return Parse(f, opt)
}

// Parse reads a trace, gzipped or not.
func Parse(r io.Reader, opt Options) (*Trace, error) {
	opt.Name = cmp.Or(opt.Name, "trace")
	if opt.Max < 0 {
		return nil, fmt.Errorf("%s: at most %d requests makes no sense; use 0 for all", opt.Name, opt.Max)
	}
	p := parser{opt: opt, format: opt.Format}
	if err := p.all(r); err != nil {
		return nil, err
	}
	return p.finish()
}

// parser reads line by line. Rows carry their time in the file's own clock
// until finish makes them relative.
type parser struct {
	opt     Options
	format  Format
	line    int
	columns *columns // of a CSV, once its header was read
	rows    []row
	out     Trace
}

type row struct {
	at  time.Duration // of the format's own epoch
	req Request
}

func (p *parser) all(r io.Reader) (err error) {
	p.line, err = Lines{Name: p.opt.Name, Most: maxLine, What: "is it a trace?"}.Each(r,
		func(n int, line []byte, _ bool) (more bool, err error) {
			if n == 1 {
				line = bytes.TrimSpace(bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))) // a byte order mark
			}
			if len(line) == 0 {
				return true, nil
			}
			if p.opt.Max > 0 && len(p.rows) == p.opt.Max {
				p.out.Cut = true
				return false, nil
			}
			return true, p.one(line)
		})
	return err
}

// one takes a line that is not empty.
func (p *parser) one(line []byte) error {
	if p.format == "" || p.format == Auto {
		p.format = AzureCSV
		switch {
		case line[0] == '{':
			p.format = MooncakeJSONL
		case line[0] == '[':
			return errors.New("a list in JSON is not read; write an object on a line of its own for each request, as `jq -c '.[]'` does")
		case bytes.HasPrefix(line, []byte("PAR1")):
			return errors.New("a Parquet file is not read; write it as CSV, as `duckdb -csv` or pandas' to_csv do")
		case !utf8.Valid(line) || bytes.IndexByte(line, 0) >= 0:
			return errors.New("the file is no text; a trace is CSV or JSON lines, gzipped or not (docs/traces.md)")
		}
	}
	var (
		r   row
		err error
	)
	switch p.format {
	case MooncakeJSONL:
		r, err = mooncakeRow(line)
	case AzureCSV:
		if p.columns == nil {
			p.columns, err = azureHeader(line)
			if err != nil || p.columns.named {
				return err
			}
		}
		r, err = p.columns.row(line)
	default:
		return fmt.Errorf("unknown format %q; use %s, %s or %s", p.format, Auto, AzureCSV, MooncakeJSONL)
	}
	switch {
	case err != nil:
		return err
	case r.req.Prompt == 0:
		p.out.NoPrompt++
	case r.req.Output == 0:
		p.out.NoOutput++
	default:
		if blocks := (r.req.Prompt + BlockTokens - 1) / BlockTokens; len(r.req.HashIDs) > blocks {
			r.req.HashIDs = r.req.HashIDs[:blocks:blocks]
			p.out.CutHashes++
		}
		p.rows = append(p.rows, r)
	}
	return nil
}

// finish sorts the rows and makes their times relative to the first.
func (p *parser) finish() (*Trace, error) {
	if len(p.rows) == 0 {
		return nil, fmt.Errorf("%s: no requests (%d lines, %d rows without output tokens, %d without prompt tokens)",
			p.opt.Name, p.line, p.out.NoOutput, p.out.NoPrompt)
	}
	byTime := func(a, b row) int { return cmp.Compare(a.at, b.at) }
	if !slices.IsSortedFunc(p.rows, byTime) {
		p.out.Unsorted = true
		slices.SortStableFunc(p.rows, byTime)
	}
	first := p.rows[0].at // times are from 0 to maxSeconds, so no difference overflows
	p.out.Requests = make([]Request, len(p.rows))
	for i, r := range p.rows {
		r.req.At = r.at - first
		p.out.Requests[i] = r.req
	}
	p.out.Format = p.format
	if n := len(p.rows); p.columns != nil && p.columns.unit == time.Second && first < oldestUnix && n >= 20 {
		p.out.Slow = p.out.Requests[n-1].At > time.Duration(n)*time.Minute
	}
	if first >= oldestUnix {
		p.out.Start = time.Unix(0, int64(first)).UTC()
	}
	return &p.out, nil
}

func checkTokens(name string, n int64) (int, error) {
	if n < 0 || n > maxTokens {
		return 0, fmt.Errorf("%s is %d; a request has 0 to %d tokens", name, n, maxTokens)
	}
	return int(n), nil
}
