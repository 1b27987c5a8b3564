import { Component } from '@angular/core'

export class Runs {
  timer = setInterval(() => this.load(), 5000)
}
