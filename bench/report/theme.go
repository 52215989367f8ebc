package report

import (
	"fmt"
	"html"
	"image/color"
	"regexp"
	"strings"
)

// Plots are drawn in colours that stand for roles; themed replaces them by
// variables of the page, which knows whether it is light or dark.
var (
	ink   = role(1)
	muted = role(2)
	grid  = role(3)
	paper = role(4)
)

const firstSeries = 16

// seriesColors is how many runs get a colour of their own (page.html).
const seriesColors = 6

func role(n uint8) color.NRGBA { return color.NRGBA{R: 1, G: 2, B: n, A: 255} }

func seriesColor(i int) color.NRGBA { return role(firstSeries + uint8(i%seriesColors)) }

// seriesVar is the colour of run i in the page's style.
func seriesVar(i int) string { return fmt.Sprintf("var(--series%d)", i%seriesColors) }

func faded(c color.NRGBA, alpha uint8) color.NRGBA {
	c.A = alpha
	return c
}

var (
	roleColors = func() *strings.Replacer {
		pairs := []string{"#010201", "var(--ink)", "#010202", "var(--muted)", "#010203", "var(--grid)", "#010204", "var(--paper)"}
		for i := range seriesColors {
			pairs = append(pairs, fmt.Sprintf("#0102%02X", firstSeries+i), seriesVar(i))
		}
		return strings.NewReplacer(pairs...)
	}()
	svgHead   = regexp.MustCompile(`(?s)^.*?<svg [^>]*?viewBox="([^"]*)"[^>]*>`)
	fontStyle = regexp.MustCompile(`font-family:[^;"]*;(?:font-(?:variant|weight|style):[^;"]*;)*`)
)

// themed makes a file of SVG a part of a page: as wide as there is room, in the
// page's colours and font, with words for those who cannot see it.
func themed(svg, what string) string {
	svg = svgHead.ReplaceAllStringFunc(svg, func(head string) string {
		box := svgHead.FindStringSubmatch(head)[1]
		title := html.EscapeString(what)
		return `<svg viewBox="` + box + `" role="img" aria-label="` + title + `"><title>` + title + `</title>`
	})
	svg = fontStyle.ReplaceAllString(svg, "")
	return strings.TrimSpace(roleColors.Replace(svg))
}
