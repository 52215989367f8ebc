package trace

import (
	"strings"
	"time"
)

// What a column or a member can hold.
const (
	when = iota
	prompt
	output
)

var (
	azureNames = [3]string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
	natural    = [3]string{"timestamp", "input_length", "output_length"}
	says       = [3]string{"when a request arrived", "how many tokens its prompt has", "how many tokens were generated"}
)

// names are those in use, lower case and without '_', '-', '.' and spaces. A time may
// have its unit behind it: timestamp_ms.
var names = [3][]string{
	{
		"timestamp", "time", "ts", "arrival", "arrivaltime", "arrivaltimestamp", "arrivedat", "arrivedtime", "requesttime", "requesttimestamp",
		"starttime", "createdat",
	},
	{
		"contexttokens", "contextlength", "contextlen", "prompttokens", "promptlength", "promptlen", "promptsize", "inputtokens", "inputlength",
		"inputlen",
		"inputsize", "requesttokens", "prefilltokens", "numprefilltokens", "numprompttokens", "numinputtokens", "prompttokencount",
		"inputtokencount", "isl",
	},
	{
		"generatedtokens", "generatedlength", "generatedlen", "generationtokens", "outputtokens", "outputlength", "outputlen", "outputsize",
		"completiontokens", "completionlength", "completionlen", "responsetokens", "responselength", "responselen", "decodetokens",
		"numdecodetokens",
		"numoutputtokens", "numgeneratedtokens", "numcompletiontokens", "outputtokencount", "completiontokencount", "osl",
	},
}

// units may stand behind the name of a time.
var units = []struct {
	name string
	unit time.Duration
}{{"ms", time.Millisecond}, {"milliseconds", time.Millisecond}, {"us", time.Microsecond}, {"sec", time.Second}, {"seconds", time.Second},
	{"s", time.Second}}

var (
	plainName = strings.NewReplacer("_", "", "-", "", " ", "", ".", "", "(", "", ")", "")
	known     = func() map[string]int {
		all := map[string]int{}
		for which, list := range names {
			for _, n := range list {
				all[n] = which
			}
		}
		return all
	}()
)

// meaning tells what a column or a member of this name holds. unit is that of
// its numbers where the name tells it, else 0.
func meaning(name string) (which int, unit time.Duration, ok bool) {
	name = plainName.Replace(strings.ToLower(name))
	if which, ok = known[name]; ok {
		return which, 0, true
	}
	for _, u := range units {
		if bare, has := strings.CutSuffix(name, u.name); has {
			if which, ok = known[bare]; ok && which == when {
				return when, u.unit, true
			}
		}
	}
	return 0, 0, false
}
