// Command outages stages what goes wrong in fleets, with a proxy, engines and clients as processes
// of this machine, and writes down what the live page says: after how many seconds, in which words,
// and how it looks. What is staged was listed before the page was looked at, half of it by somebody
// who did not know the page (outage.by).
//
//	go run ./bench/claims/outages                # make claim NAME=outages
//	go run ./bench/claims/outages -only 3,7 -out "" -pictures out/outages
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
)

type options struct {
	testbed.Options
	out, pictures, only, alerts string
	together                    int
}

func main() { testbed.Main("outages", run) }

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	var o options
	flags := o.Flags("outages")
	flags.StringVar(&o.out, "out", "docs/results/outages.md", "the page whose table is written; empty: none")
	flags.StringVar(&o.pictures, "pictures", "docs/img/outages", "folder of the pictures")
	flags.StringVar(&o.alerts, "alerts", "bench/outside/dashboards/testdata/outages",
		"folder of the tests of alerts, which have the metric of each outage; empty: none")
	flags.StringVar(&o.only, "only", "", "numbers of outages, such as 3,7; empty: all")
	flags.IntVar(&o.together, "together", 3, "so many are staged side by side")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	chosen, err := choose(o.only)
	if err != nil {
		return err
	}
	if o.out != "" && len(chosen) < len(outages) {
		return errors.New("the page has all outages: leave -only out, or write -out \"\" and another -pictures")
	}
	if err := os.MkdirAll(o.pictures, 0o755); err != nil {
		return err
	}
	if err := shoot(ctx, out); err != nil { // here and not after minutes, if there is no browser
		return err
	}
	w, err := testbed.New(ctx, "outages", o.Options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close(true)) }()
	for _, one := range chosen {
		one.alerts = o.alerts
	}
	told := stageAll(ctx, w, chosen, &camera{folder: o.pictures}, o.together, out)
	if told != nil && !errors.Is(told, errToldWrongly) {
		return told
	}
	if err := shoot(ctx, out, "-shrink", o.pictures); err != nil {
		return err
	}
	table := tell(chosen, o.pictures)
	fmt.Fprintln(out, table)
	if o.out == "" || told != nil {
		return told
	}
	return page.Write(o.out, "claim NAME=outages", "outages", "Outages", table)
}

// choose are the outages of a list of numbers.
func choose(only string) (chosen []*outage, err error) {
	for i := range outages {
		outages[i].number = i + 1
		chosen = append(chosen, &outages[i])
	}
	if only == "" {
		return chosen, nil
	}
	var wanted []*outage
	for _, word := range strings.Split(only, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 || n > len(chosen) {
			return nil, fmt.Errorf("-only %s: outages have the numbers 1 to %d", only, len(chosen))
		}
		wanted = append(wanted, chosen[n-1])
	}
	return wanted, nil
}

// stageAll stages some at a time, and stops at the first that cannot be staged.
func stageAll(ctx context.Context, w *testbed.World, all []*outage, c *camera, together int, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var errs []error
	var guard sync.Mutex
	var wait sync.WaitGroup
	places := make(chan struct{}, max(1, together))
	for _, o := range all {
		places <- struct{}{}
		if ctx.Err() != nil {
			break
		}
		wait.Go(func() {
			defer func() { <-places }()
			fmt.Fprintf(out, "%d. %s\n", o.number, o.title)
			if err := o.stage(ctx, w, c); err != nil {
				guard.Lock()
				defer guard.Unlock()
				errs = append(errs, fmt.Errorf("outage %d: %w", o.number, err))
				if !errors.Is(err, errToldWrongly) { // the others show whether they are told rightly
					cancel()
				}
			}
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}

// tell is a part of the page for each outage.
func tell(all []*outage, pictures string) string {
	var b strings.Builder
	for _, o := range all {
		fmt.Fprintf(&b, "### %d. %s\n\n%s\n\n", o.number, o.title, o.staged)
		t := page.Markdown{Head: []string{"after", "the page says"}, Text: 1}
		for _, s := range o.heard {
			t.Add(s.after(), s.says)
		}
		if len(o.heard) == 0 {
			t.Add("–", "Nothing is wrong.")
		}
		b.WriteString(t.String())
		fmt.Fprintf(&b, "\n%s%s\n\n![The page %s after the outage begins](%s)\n\n", o.pager(), o.ends(), o.look,
			picture(o.number, relative(pictures)))
	}
	return b.String()
}

// relative is the folder of the pictures as the page links to it.
func relative(folder string) string { return "../" + strings.TrimPrefix(folder, "docs/") }

func picture(number int, folder string) string { return fmt.Sprintf("%s/%02d.png", folder, number) }

// sorted has what was heard first first.
func sorted(heard []said) []said {
	slices.SortStableFunc(heard, func(a, b said) int { return int(a.at - b.at) })
	return heard
}
