package engine

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// PageError says that a number or a name on an engine's page cannot be right. It is not used, or
// the whole page is not.
type PageError struct {
	Name string
	Says string
}

func (e *PageError) Error() string {
	return fmt.Sprintf("the engine's page cannot be right: %s says %s", e.Name, e.Says)
}

// These are read from each page, whatever names the config gives other series.
const (
	CacheConfigName = "vllm:cache_config_info"     // its labels describe the KV memory
	StartTimeName   = "process_start_time_seconds" // a new value means that the engine restarted
)

// The largest numbers that are accepted from a page, far above those of any engine: a larger one
// comes from a broken counter, or from a page that is not an engine's.
const (
	MostRanks    = 4096    // behind one address
	MostRequests = 1 << 20 // that run or wait on a rank; each needs a connection
	// At 1 KB per token, less than models need, the tokens of a rank would take 100 TB.
	MostKVTokens = 100_000_000_000
	MostStep     = 100_000_000 // tokens in one step of a rank, or steps in a cycle
	MostContext  = 100_000_000 // tokens of one request, prompt and answer
	mostCounted  = 1 << 53     // a 64-bit float cannot count by one above it
	// A share may be above 1, because engines read its two terms one after the other.
	mostShare   = 1.01
	mostBlock   = 1 << 20         // tokens
	latestStart = 100_000_000_000 // Unix seconds: the year 5138
)

// Limits has the series to read from a page, with the largest value of each.
type Limits map[string]float64

// Add sets a limit and returns l.
func (l Limits) Add(limit float64, names ...string) Limits {
	for _, n := range names {
		l[n] = limit
	}
	return l
}

// Counters adds series that count since the engine's start.
func (l Limits) Counters(names ...string) Limits { return l.Add(mostCounted, names...) }

// Shares adds series of shares of the KV memory.
func (l Limits) Shares(names ...string) Limits { return l.Add(mostShare, names...) }

func (l Limits) limitOf(name string) (limit float64, wanted bool) {
	switch name {
	case StartTimeName:
		return latestStart, true
	case CacheConfigName: // its value is not used
		return math.MaxFloat64, true
	}
	limit, wanted = l[name]
	return limit, wanted
}

// ParseSeries reads the series in limits, the start time and the cache config from a Prometheus
// text page, as untyped. A value must be NaN (unknown) or from 0 to its limit; otherwise no value
// is trusted.
func ParseSeries(page []byte, limits Limits) (map[string]*dto.MetricFamily, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(linesOf(page, limits)))
	if err != nil {
		line := 0 // the parser's message would quote the page
		if parseErr := (expfmt.ParseError{}); errors.As(err, &parseErr) {
			line = parseErr.Line
		}
		return nil, fmt.Errorf("metrics page: line %d of the gauges in it is not in the text format", line)
	}
	for name, f := range families {
		limit, _ := limits.limitOf(name)
		for _, m := range f.GetMetric() {
			if v := m.GetUntyped().GetValue(); v < 0 || v > limit { // NaN passes: both comparisons are false
				return nil, &PageError{name, strconv.FormatFloat(v, 'g', -1, 64)}
			}
		}
	}
	return families, nil
}

// linesOf leaves out TYPE lines, so that all series are untyped.
func linesOf(page []byte, limits Limits) []byte {
	var lines []byte
	for line := range bytes.Lines(page) {
		end := bytes.IndexAny(line, "{ \t")
		if end <= 0 { // no sample
			continue
		}
		if _, wanted := limits.limitOf(string(line[:end])); wanted {
			lines = append(lines, bytes.TrimRight(line, "\r\n")...)
			lines = append(lines, '\n')
		}
	}
	return lines
}

// Number is the text of a JSON number; empty: none. One number that does not fit into an int would
// otherwise make the whole document unreadable.
type Number string

// UnmarshalJSON takes a value of any type.
func (n *Number) UnmarshalJSON(raw []byte) error {
	*n = Number(raw)
	return nil
}

// Whole returns 0 if there is no number.
func (n Number) Whole(name string, limit int64) (int, error) {
	v, _, err := Whole(name, string(n), limit)
	return int(v), err
}

// Whole reads a whole number from a page. A number that is negative, above limit or not whole gives
// a PageError.
func Whole(name, text string, limit int64) (n int64, known bool, err error) {
	v, err := strconv.ParseFloat(text, 64) // too large for a float64: infinite, which is above limit
	switch {
	case errors.Is(err, strconv.ErrSyntax) || math.IsNaN(v):
		return 0, false, nil
	case v < 0 || v > float64(limit) || v != math.Trunc(v):
		return 0, false, &PageError{name, quotedShort(text)}
	}
	return int64(v), true, nil
}

func quotedShort(text string) string {
	const maxQuoted = 40
	if len(text) > maxQuoted {
		text = text[:maxQuoted] + "..."
	}
	return strconv.QuoteToASCII(text)
}

// Label returns "" if there is no such label.
func Label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// RankLabel names the rank: engine for vLLM, dp_rank for SGLang (0.5.23,
// observability/metrics_collector.py).
func RankLabel(m *dto.Metric) string { return cmp.Or(Label(m, "engine"), Label(m, "dp_rank")) }

// maxByRank takes each rank's value from the first series that has one. Of several that differ in
// other labels (LoRA), the largest counts.
func maxByRank(families map[string]*dto.MetricFamily, names []string) map[string]float64 {
	out := map[string]float64{}
	for _, name := range names {
		found := map[string]float64{}
		for _, m := range families[name].GetMetric() {
			v, e := m.GetUntyped().GetValue(), RankLabel(m)
			if math.IsNaN(v) {
				continue
			}
			if old, seen := found[e]; !seen || v > old {
				found[e] = v
			}
		}
		for e, v := range found {
			if _, known := out[e]; !known { // by an earlier name
				out[e] = v
			}
		}
	}
	return out
}

func sumByRank(f *dto.MetricFamily) map[string]float64 {
	out := map[string]float64{}
	for _, m := range f.GetMetric() {
		if v := m.GetUntyped().GetValue(); !math.IsNaN(v) {
			out[RankLabel(m)] += v
		}
	}
	return out
}

// firstRank is the lowest number of the label engine; 0 if there is none.
func firstRank(families map[string]*dto.MetricFamily) (int, error) {
	var all []int
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if n, err := strconv.Atoi(Label(m, "engine")); err == nil && n >= 0 {
				all = append(all, n)
			}
		}
	}
	if len(all) == 0 {
		return 0, nil
	}
	slices.Sort(all)
	all = slices.Compact(all)
	if highest := all[len(all)-1]; len(all) > MostRanks || highest > math.MaxInt32 {
		return 0, &PageError{"the label engine", fmt.Sprintf("%d different numbers up to %d", len(all), highest)}
	}
	return all[0], nil
}
