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

// PageError says that a number or a name on an engine's page, such as its metrics page, cannot be right. The page, or at
// least this number or name, is not used.
type PageError struct {
	Name string // what it is, such as the name of a number's series
	Says string // its text on the page
}

func (e *PageError) Error() string {
	return fmt.Sprintf("the engine's page cannot be right: %s says %s", e.Name, e.Says)
}

// Names of series that are read from each page, whatever names the config gives other series.
const (
	CacheConfigName = "vllm:cache_config_info"     // its labels describe the KV memory
	StartTimeName   = "process_start_time_seconds" // when the process started; a new value means that the engine restarted
)

// The largest numbers that are accepted from an engine's page. They are far above those of any engine. A
// larger number comes from a broken counter, or from a page that is not an engine's.
const (
	MostRanks    = 4096            // most ranks behind one address
	MostRequests = 1 << 20         // most requests that run or wait on a rank; each needs a connection
	MostKVTokens = 100_000_000_000 // most KV tokens of a rank: at 1 KB per token, less than models need, they would take 100 TB
	MostStep     = 100_000_000     // most tokens in one step of a rank, and most steps in a cycle
	MostContext  = 100_000_000     // most tokens of one request, prompt and answer together
	mostCounted  = 1 << 53         // largest count; a 64-bit float cannot count by one above it
	mostShare    = 1.01            // largest share of the KV memory; above 1, because engines read its two terms one after the other
	mostBlock    = 1 << 20         // most tokens of a KV block
	latestStart  = 100_000_000_000 // latest start time in Unix seconds: the year 5138
)

// Limits lists the series to read from a page, and the largest value that each may have.
type Limits map[string]float64

// Add sets the limit of the series with these names and returns l.
func (l Limits) Add(limit float64, names ...string) Limits {
	for _, n := range names {
		l[n] = limit
	}
	return l
}

// Counters adds series that count something since the engine's start. Their limit is mostCounted. It returns l.
func (l Limits) Counters(names ...string) Limits { return l.Add(mostCounted, names...) }

// Shares adds series whose values are shares of the KV memory. Their limit is mostShare. It returns l.
func (l Limits) Shares(names ...string) Limits { return l.Add(mostShare, names...) }

// limitOf returns the limit of a name; wanted is false if the series is not to be read.
func (l Limits) limitOf(name string) (limit float64, wanted bool) {
	switch name {
	case StartTimeName:
		return latestStart, true
	case CacheConfigName: // only the labels of this series are used, so its value has no limit
		return math.MaxFloat64, true
	}
	limit, wanted = l[name]
	return limit, wanted
}

// ParseSeries reads the series in limits, the start time and the cache config from a page in the Prometheus text format. All series of the
// result are untyped. A value must be NaN, which means unknown, or between 0 and the limit of its name. If any value is wrong,
// ParseSeries returns a PageError and no values, because the other values cannot be trusted either.
func ParseSeries(page []byte, limits Limits) (map[string]*dto.MetricFamily, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(linesOf(page, limits)))
	if err != nil {
		line := 0 // the error names only the line, because the parser's message quotes the page
		if parseErr := (expfmt.ParseError{}); errors.As(err, &parseErr) {
			line = parseErr.Line
		}
		return nil, fmt.Errorf("metrics page: line %d of the gauges in it is not in the text format", line)
	}
	for name, f := range families {
		limit, _ := limits.limitOf(name)
		for _, m := range f.GetMetric() {
			if v := m.GetUntyped().GetValue(); v < 0 || v > limit { // NaN, which means unknown, passes: both comparisons are false
				return nil, &PageError{name, strconv.FormatFloat(v, 'g', -1, 64)}
			}
		}
	}
	return families, nil
}

// linesOf returns the lines of a page that are samples of the series in limits, of the start time or of the cache config. It does not check
// their values. It leaves out TYPE lines, so that all series are untyped and their values can be read in the same way.
func linesOf(page []byte, limits Limits) []byte {
	var lines []byte
	for line := range bytes.Lines(page) {
		end := bytes.IndexAny(line, "{ \t") // the name ends where its labels begin or, without labels, at white space
		if end <= 0 {                       // the line is no sample
			continue
		}
		if _, wanted := limits.limitOf(string(line[:end])); wanted {
			lines = append(lines, bytes.TrimRight(line, "\r\n")...)
			lines = append(lines, '\n')
		}
	}
	return lines
}

// Number is the text of a number in JSON; empty: there is none. It is a text, because one number that does not fit into an int
// would otherwise make the whole document unreadable.
type Number string

// UnmarshalJSON stores the text of a JSON value of any type, so it never fails.
func (n *Number) UnmarshalJSON(raw []byte) error {
	*n = Number(raw)
	return nil
}

// Whole returns the number; 0: it is not known. If the number is negative, above limit or not whole, it returns a PageError with
// this name.
func (n Number) Whole(name string, limit int64) (int, error) {
	v, _, err := Whole(name, string(n), limit)
	return int(v), err
}

// Whole reads a whole number from a text of an engine's page. If the text is not a number,
// known is false. If the number is negative, above limit or not whole, the error is a PageError with this name.
func Whole(name, text string, limit int64) (n int64, known bool, err error) {
	v, err := strconv.ParseFloat(text, 64) // a number too large for a float64 becomes infinite, which is above limit
	switch {
	case errors.Is(err, strconv.ErrSyntax) || math.IsNaN(v):
		return 0, false, nil
	case v < 0 || v > float64(limit) || v != math.Trunc(v):
		return 0, false, &PageError{name, quotedShort(text)}
	}
	return int64(v), true, nil
}

// quotedShort returns a text of a page in quotes, cut after 40 bytes.
func quotedShort(text string) string {
	const maxQuoted = 40
	if len(text) > maxQuoted {
		text = text[:maxQuoted] + "..."
	}
	return strconv.QuoteToASCII(text)
}

// Label returns the value of a label; empty: the series has no such label.
func Label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// RankLabel returns the label that names the rank of a series: engine for vLLM, dp_rank for SGLang (0.5.23,
// observability/metrics_collector.py).
func RankLabel(m *dto.Metric) string { return cmp.Or(Label(m, "engine"), Label(m, "dp_rank")) }

// maxByRank returns one value for each rank, from the first series in names that has a value for it. If a
// rank has several series of one name, because other labels differ (LoRA), the largest value counts.
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
			if _, known := out[e]; !known { // known: an earlier name has a value for this engine
				out[e] = v
			}
		}
	}
	return out
}

// sumByRank adds up the values of each rank. All values are untyped, because ParseSeries
// leaves out the lines of a page that say which are gauges and which are counters.
func sumByRank(f *dto.MetricFamily) map[string]float64 {
	out := map[string]float64{}
	for _, m := range f.GetMetric() {
		if v := m.GetUntyped().GetValue(); !math.IsNaN(v) { // NaN: the engine does not know the value
			out[RankLabel(m)] += v
		}
	}
	return out
}

// firstRank returns the lowest number that the label engine has on a page; 0 if it has none. It returns a PageError if there are more
// numbers than one address can have ranks, or if one is too large.
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
