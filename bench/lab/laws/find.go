package laws

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"evenkeel/internal/spelling"
)

// kinds are the words of a name.
var kinds = [...]string{"model", "engine", "GPU", "number of ranks"}

// Find returns the law of a name, whose letters may be of either case; the organisation before a
// model may stand there, too. The table has no law between two numbers of ranks: experts are spread
// over all of them, so that another number is another engine. An error says which word of the name
// is wrong.
func Find(name string) (*Entry, error) {
	left, given := file().Laws, strings.Split(name[strings.LastIndexByte(name, '/')+1:], ",")
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("%q is no law of the table: %s; write MODEL,ENGINE,GPU,RANKS as in %s (evenkeel simulate --law list prints all)",
			name, fmt.Sprintf(format, args...), left[0].Name())
	}
	for i, kind := range kinds {
		var there []string
		for k := range left {
			if word := left[k].word(i); !slices.Contains(there, word) {
				there = append(there, word)
			}
		}
		if i == 0 { // else the table has them in order
			slices.SortFunc(there, func(a, b string) int { return cmp.Compare(strings.ToLower(a), strings.ToLower(b)) })
		}
		if i == len(given) || strings.TrimSpace(given[i]) == "" {
			return nil, wrong("it lacks the %s, which may be %s", kind, strings.Join(there, ", "))
		}
		word := strings.TrimSpace(given[i])
		same := slices.DeleteFunc(slices.Clone(left), func(e Entry) bool { return !strings.EqualFold(e.word(i), word) })
		if len(same) == 0 {
			before, hint := "", ""
			if i > 0 {
				before = " for " + strings.Join(strings.Split(left[0].Name(), ",")[:i], ",")
			}
			if i < len(kinds)-1 { // a number is not misspelt
				hint = spelling.Hint(word, there)
			}
			return nil, wrong("there is no %s %q%s%s, but %s", kind, word, before, hint, strings.Join(there, ", "))
		}
		left = same
	}
	if len(given) > len(kinds) {
		return nil, wrong("it has %d words", len(given))
	}
	return &left[0], nil
}

// word is a word of the entry's name.
func (e *Entry) word(i int) string { return strings.Split(e.Name(), ",")[i] }

// List writes which laws there are: a line for each model, engine, GPU and form.
func List(w io.Writer) error {
	type kind struct{ model, engine, gpu, form string }
	ranks, kinds := map[kind][]string{}, []kind(nil)
	for _, e := range file().Laws {
		model, _, _ := strings.Cut(e.Name(), ",")
		k := kind{model: model, engine: e.Engine, gpu: e.GPU, form: e.Form().String()}
		if ranks[k] == nil {
			kinds = append(kinds, k)
		}
		ranks[k] = append(ranks[k], fmt.Sprint(e.Ranks))
	}
	slices.SortStableFunc(kinds, func(a, b kind) int {
		return cmp.Or(cmp.Compare(strings.ToLower(a.model), strings.ToLower(b.model)), cmp.Compare(b.engine, a.engine))
	})
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "MODEL\tENGINE\tGPU\tRANKS\tform of a decode step")
	for _, k := range kinds {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", k.model, k.engine, k.gpu, strings.Join(ranks[k], " "), k.form)
	}
	return t.Flush()
}
