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

// PageError says that a number on an engine's page cannot be right, so that the page, or at least the number, is not
// used.
type PageError struct {
	Name string // name of the number
	Says string // text that stands for it on the page
}

func (e *PageError) Error() string {
	return fmt.Sprintf("the engine's page cannot be right: %s says %s", e.Name, e.Says)
}

// These are the largest numbers that can be right on an engine's page. They are far above what any engine has: a
// larger one comes from a broken counter, or from a page that is not an engine's.
const (
	MostRanks    = 4096            // behind one address
	MostRequests = 1 << 20         // that run or wait on a rank: each has a connection
	MostKVTokens = 100_000_000_000 // in the memory of a rank: 100 TB at 1 KB for each, and models need more than that
	MostStep     = 100_000_000     // tokens of one step of a rank, and steps of a cycle
	MostContext  = 100_000_000     // tokens of one request
	mostCounted  = 1 << 53         // above this a counter of 64-bit floats cannot count by one any more
	mostShare    = 1.01            // of the KV memory: it is the quotient of two numbers that an engine reads one after the other
	mostBlock    = 1 << 20         // tokens of a KV block
	latestStart  = 100_000_000_000 // Unix seconds: the year 5138
)

// Limits has the series that are read from a page: the largest value of each, by name.
type Limits map[string]float64

// Add sets the limit of these names.
func (l Limits) Add(most float64, names ...string) Limits {
	for _, n := range names {
		l[n] = most
	}
	return l
}

// Counters sets the limit of names that count since the engine's start.
func (l Limits) Counters(names ...string) Limits { return l.Add(mostCounted, names...) }

// Shares sets the limit of names that are a share of the KV memory.
func (l Limits) Shares(names ...string) Limits { return l.Add(mostShare, names...) }

// of is the limit of a name. wanted is false if the series is not read.
func (l Limits) of(name string) (most float64, wanted bool) {
	switch name {
	case StartTimeName:
		return latestStart, true
	case CacheConfigName: // its information is in its labels
		return math.MaxFloat64, true
	}
	most, wanted = l[name]
	return most, wanted
}

// Named reads the series of these names from a page in the Prometheus text format, with the start time and the cache
// config that each page has, all of them untyped. A value must be NaN, which stands for unknown, or lie between 0 and
// the limit of its name. If any value is wrong, the whole page is a PageError, because then nothing shows that the
// other values are right.
func Named(page []byte, limits Limits) (map[string]*dto.MetricFamily, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(onlyNamed(page, limits)))
	if err != nil {
		line := 0 // only the line is used: the rest of the parser's message quotes the page
		if at := (expfmt.ParseError{}); errors.As(err, &at) {
			line = at.Line
		}
		return nil, fmt.Errorf("metrics page: line %d of the gauges in it is not in the text format", line)
	}
	for name, f := range families {
		most, _ := limits.of(name)
		for _, m := range f.GetMetric() {
			if v := m.GetUntyped().GetValue(); v < 0 || v > most {
				return nil, &PageError{name, strconv.FormatFloat(v, 'g', -1, 64)}
			}
		}
	}
	return families, nil
}

// onlyNamed keeps the sample lines of exactly these names. Without their TYPE lines all series are untyped, which is
// enough to read their values.
func onlyNamed(page []byte, names Limits) []byte {
	var kept []byte
	for line := range bytes.Lines(page) {
		end := bytes.IndexAny(line, "{ \t")
		if end <= 0 {
			continue
		}
		if _, wanted := names.of(string(line[:end])); wanted {
			kept = append(kept, bytes.TrimRight(line, "\r\n")...)
			kept = append(kept, '\n')
		}
	}
	return kept
}

// Number is the text of a number in JSON; empty: there is none. With an int instead, a number that is not an int
// would make the whole document unreadable.
type Number string

// UnmarshalJSON stores any value as it is.
func (n *Number) UnmarshalJSON(raw []byte) error {
	*n = Number(raw)
	return nil
}

// Whole is the number, 0 if it is not known. A number that is negative, above most or not whole is a PageError with
// the number's name.
func (n Number) Whole(name string, most int64) (int, error) {
	v, _, err := Whole(name, string(n), most)
	return int(v), err
}

// Whole reads a whole number from text on an engine's page; name is for the error. For text that is not a number,
// known is false. A number that is negative, above most or not whole is a PageError.
func Whole(name, text string, most int64) (n int64, known bool, err error) {
	v, err := strconv.ParseFloat(text, 64)
	switch {
	case errors.Is(err, strconv.ErrSyntax) || math.IsNaN(v):
		return 0, false, nil
	case v < 0 || v > float64(most) || v != math.Trunc(v):
		return 0, false, &PageError{name, shown(text)}
	}
	return int64(v), true, nil
}

// shown quotes text of a page, cut after 40 bytes.
func shown(text string) string {
	const most = 40
	if len(text) > most {
		text = text[:most] + "..."
	}
	return strconv.QuoteToASCII(text)
}

// Capacities is the KV capacity in tokens of each engine of a page, by the engine's label, from the series of
// vllm:cache_config_info.
func Capacities(configs []*dto.Metric) (map[string]float64, error) {
	all := map[string]float64{}
	for _, m := range configs {
		tokens, ok, err := cacheTokens(m, sharers(configs))
		if err != nil {
			return nil, err
		}
		if ok {
			all[Label(m, "engine")] = tokens
		}
	}
	return all, nil
}

// sharers is how many engines share the number of blocks on a page. An API server of vLLM adds up the blocks of all
// engines behind it, and gives that sum for every one of them. If the numbers differ, each is the engine's own.
func sharers(configs []*dto.Metric) int {
	for _, m := range configs {
		if Label(m, "num_gpu_blocks") != Label(configs[0], "num_gpu_blocks") {
			return 1
		}
	}
	return len(configs)
}

// cacheTokens is the capacity in tokens of one of n engines that share the number of blocks.
func cacheTokens(m *dto.Metric, n int) (float64, bool, error) {
	blocks, told, err := Whole(CacheConfigName+" num_gpu_blocks", Label(m, "num_gpu_blocks"), MostKVTokens*int64(n))
	if err != nil || !told { // "None" until the engine has measured its memory
		return 0, false, err
	}
	size, err := blockTokens(m)
	if err != nil {
		return 0, false, err
	}
	tokens := float64(blocks/int64(n)) * float64(size)
	if tokens > MostKVTokens {
		return 0, false, &PageError{CacheConfigName, fmt.Sprintf("num_gpu_blocks %d of block_size %d", blocks, size)}
	}
	return tokens, tokens > 0, nil
}

// blockTokens is the tokens of a KV block by a series of vllm:cache_config_info, 0 if unknown.
func blockTokens(m *dto.Metric) (int, error) {
	n, _, err := Whole(CacheConfigName+" block_size", Label(m, "block_size"), mostBlock)
	return int(n), err
}

// Label is the value of a label; empty: the series has no such label.
func Label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// byEngine takes, for each engine label, the value of the first name that has one. If other labels (LoRA) split a
// series, the largest value counts.
func byEngine(families map[string]*dto.MetricFamily, names []string) map[string]float64 {
	out := map[string]float64{}
	for _, name := range names {
		found := map[string]float64{}
		for _, m := range families[name].GetMetric() {
			v, e := m.GetUntyped().GetValue(), Label(m, "engine")
			if old, seen := found[e]; !math.IsNaN(v) && (!seen || v > old) {
				found[e] = v
			}
		}
		for e, v := range found {
			if _, newer := out[e]; !newer {
				out[e] = v
			}
		}
	}
	return out
}

// sums adds up the values of each rank: vLLM labels ranks `engine`, SGLang `dp_rank`. Of SGLang's workers of a rank,
// only one counts.
func sums(f *dto.MetricFamily) map[string]float64 {
	out := map[string]float64{}
	for _, m := range f.GetMetric() {
		if v := m.GetUntyped().GetValue(); !math.IsNaN(v) {
			out[cmp.Or(Label(m, "engine"), Label(m, "dp_rank"))] += v
		}
	}
	return out
}

// firstRank is the lowest engine label of a page, whether its value is known or not. If there are more labels than
// one address can have engines, that is a PageError.
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
	if last := all[len(all)-1]; len(all) > MostRanks || last > math.MaxInt32 {
		return 0, &PageError{"the label engine", fmt.Sprintf("%d different numbers up to %d", len(all), last)}
	}
	return all[0], nil
}
